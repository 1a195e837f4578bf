// From what is remembered to a draft tree: the likeliest continuations within a budget.
//
// Every candidate carries an estimate of the probability that it is accepted. The tree takes the likeliest first and
// stops where a draft is not worth its place in the verify step, and is dropped whole where it is not worth a wider
// step at all: a strong match gets a long chain, a weak one nothing.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tree.hpp"

namespace ngram {

struct Options {
  uint32_t max_depth;     // longest context, in tokens
  uint32_t min_match;     // shortest
  uint32_t min_breadth;   // most children after the longest contexts
  uint32_t max_breadth;   // and after the shortest; 1 gives chains
  bool by_count;          // the most frequent follower first, not the most recent
  double min_confidence;  // leave out candidates below this estimate
  double min_gain;        // propose nothing unless this many drafts are expected to be accepted
};

// What drafts come from, the closest first; null where there is none.
enum Source : uint32_t { kOwn, kShared, kCorpus, kSources };
using Sources = std::array<const ContextTree*, kSources>;

class Expander {
 public:
  explicit Expander(const Options& options);

  // Write at most `budget` nodes, on paths of at most `depth`, that may follow the `length` tokens in front of `end`.
  // Parents come before children, -1 is the root, siblings are distinct. `reserved` nodes are kept for the corpus as
  // long as it has candidates, and it gets no more. Returns the number of nodes; 0 where nothing matches well enough.
  uint32_t expand(const Sources& sources, const int32_t* end, uint32_t length, uint32_t budget, uint32_t reserved,
                  uint32_t depth, int64_t* tokens, int64_t* parents);

 private:
  struct Candidate {
    double confidence;
    uint32_t level;    // 1 = child of the root
    uint32_t serial;   // order of discovery: longer matches and likelier siblings first
    int32_t token;
    int32_t parent;    // node, -1 = the root
    Match context;     // that the token follows
    uint32_t source;
    double breadth;    // most children of the parent
  };
  struct Drafted {  // links among the nodes of the tree being made
    int32_t child, sibling;
    uint32_t sources;  // bit s: the continuations that source s knows are among the candidates
  };
  static bool later(const Candidate& a, const Candidate& b);
  void offer(uint32_t source, const Match& context, double confidence, uint32_t level, int32_t parent, double breadth);
  void offer_anchors(const int32_t* end, uint32_t length);
  double novelty(uint32_t source, const Match& context) const {
    return novelty_[source != kOwn][context.length] * trees_[source]->kinds(context);
  }
  double unseen(uint32_t source, const Match& context) const;
  int32_t& first_child(int32_t parent) { return parent < 0 ? root_child_ : drafted_[parent].child; }
  Match follow(const Candidate& taken, int32_t node, const int32_t* end, const int64_t* tokens, const int64_t* parents);

  Options options_;
  double narrowing_;  // breadth lost for each token that a context is longer
  std::vector<double> novelty_[2];  // own and others' text, by tokens matched: weight of "something new follows"
  Sources trees_{};
  std::vector<Candidate> heap_, waiting_;
  std::vector<Drafted> drafted_;
  int32_t root_child_ = -1;
  uint32_t serial_ = 0;
};

}  // namespace ngram
