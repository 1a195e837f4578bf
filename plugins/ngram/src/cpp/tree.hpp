// Which contexts occurred, how often, and what followed them.
//
// A compressed tree of contexts read backwards: from the root, the last token, the one before it, and so on to
// `max_depth` tokens. A node stands for all contexts with the same occurrences; it is named by the longest. Only
// contexts with a follower occur, so the end of a text is not in the tree. Whatever node is passed on the way of an
// insertion takes the new position as its example; as the oldest positions are forgotten first, the example of every
// node that is left is never one that was forgotten.
#pragma once

#include <algorithm>
#include <cstdint>

#include "memory.hpp"
#include "window.hpp"

namespace ngram {

// A context that occurred.
struct Match {
  uint32_t node;
  uint32_t length;    // its tokens; less than the node's depth where it ends inside the node's edge
  uint32_t position;  // of its follower, where it occurred once; kNone where more often, and `node` knows
};

struct Follower {
  int32_t token;
  uint32_t count;
  uint32_t entry;  // the tree's; kNone for the one follower of its context
};

class ContextTree {
 public:
  static constexpr uint32_t kMaxDepth = 256;

  ContextTree(Budget& budget, const Window& text, uint32_t max_depth)
      : text_(text), max_depth_(max_depth), nodes_(budget), entries_(budget) {}

  // Count the token at `position` as a follower of the contexts before it. False, and nothing is changed, where the
  // budget does not allow it.
  bool insert(uint32_t position);
  // Undo the insertion of the oldest position there is.
  void remove(uint32_t position);

  // Find the contexts that end in front of `end`, of at most `length` tokens, and occurred: shortest first into `path`
  // (room for max_depth), one for each group with the same occurrences. Returns their number.
  uint32_t locate(const int32_t* end, uint32_t length, Match* path) const;
  // The longest of them; its length is 0 where there is none.
  Match longest(const int32_t* end, uint32_t length) const;

  // The context of `match`, which occurred once, made longer by what followed it; of length 0 at the end of the text.
  Match longer(const Match& match) const {
    const uint32_t position = text_.after(match.position);
    return {kNone, position == kNone ? 0 : std::min(match.length + 1, max_depth_), position};
  }

  // What followed the context: the most recent one, and from each to the next one, as long as there are more `kinds`.
  Follower first(const Match& match) const;
  Follower next(const Follower& newer) const { return follower(entries_[newer.entry].older); }
  uint32_t kinds(const Match& match) const { return match.position != kNone ? 1 : nodes_[match.node].kinds; }
  uint32_t count(const Match& match) const { return match.position != kNone ? 1 : nodes_[match.node].count; }
  size_t nodes() const { return nodes_.size(); }
  size_t entries() const { return entries_.size(); }

 private:
  static constexpr uint32_t kRoot = kNone - 1;  // has no node: only the owner of others

  struct alignas(32) Node {  // half a cache line
    uint32_t owner;  // parent
    int32_t token;   // first token of the edge from it
    uint32_t next;
    uint32_t position;  // of the most recent follower
    uint32_t count;     // occurrences
    uint32_t kinds;     // different followers
    union {
      int32_t only;     // the one follower, which has no entry
      uint32_t newest;  // where there are more, the entry of the most recent
    };
    uint32_t depth;  // tokens of the longest context
  };
  struct Entry {
    uint32_t owner;  // node
    int32_t token;   // what followed it
    uint32_t next;
    uint32_t count;
    uint32_t newer, older;
  };

  uint32_t depth(uint32_t node) const { return node == kRoot ? 0 : nodes_[node].depth; }
  Follower follower(uint32_t entry) const { return {entries_[entry].token, entries_[entry].count, entry}; }
  uint32_t entry_of(uint32_t node, int32_t token) const;
  void add_entry(uint32_t node, int32_t token, uint32_t count);
  void drop_entry(uint32_t node, uint32_t entry);
  void record(uint32_t node, uint32_t position);
  void forget(uint32_t node, int32_t token);
  uint32_t split(uint32_t node, uint32_t depth, uint32_t position);
  void merge(uint32_t node);

  const Window& text_;
  uint32_t max_depth_;
  Keyed<Node> nodes_;
  Keyed<Entry> entries_;
};

}  // namespace ngram
