#include "tree.hpp"

#include <algorithm>

namespace ngram {

namespace {

// Followers that are looked through before the table is asked.
constexpr uint32_t kNear = 3;

}  // namespace

bool ContextTree::insert(uint32_t position) {
  const int32_t* token = text_.at(position);
  const uint32_t length = std::min(max_depth_, text_.before(position));
  uint32_t path[kMaxDepth];
  uint32_t passed = 0, node = kRoot, depth = 0, cut = kNone, cut_depth = 0;
  while (depth < length) {
    const uint32_t child = nodes_.find(node, token[-1 - static_cast<int32_t>(depth)]);
    if (child == kNone) break;
    const Node& found = nodes_[child];
    const int32_t* example = text_.at(found.position);
    const uint32_t stop = std::min(found.depth, length);
    uint32_t same = depth + 1;
    while (same < stop && example[-1 - static_cast<int32_t>(same)] == token[-1 - static_cast<int32_t>(same)]) ++same;
    if (same < found.depth) {
      cut = child;
      cut_depth = same;
      break;
    }
    if (found.kinds > 1) prefetch(&entries_[found.newest]);
    path[passed++] = node = child;
    depth = found.depth;
  }
  const size_t entries = 2 * size_t{passed} + (cut == kNone ? 0 : size_t{nodes_[cut].kinds} + 1);
  if (!nodes_.reserve(2) || !entries_.reserve(entries)) return false;

  for (uint32_t i = 0; i < passed; ++i) record(path[i], position);
  if (cut != kNone) {
    node = split(cut, cut_depth, position);
    depth = cut_depth;
  }
  if (depth < length) {
    const uint32_t leaf = nodes_.add(node, token[-1 - static_cast<int32_t>(depth)]);
    Node& made = nodes_[leaf];
    made.position = position;
    made.count = 1;
    made.kinds = 1;
    made.only = *token;
    made.depth = length;
  }
  return true;
}

void ContextTree::remove(uint32_t position) {
  const int32_t* token = text_.at(position);
  const uint32_t length = std::min(max_depth_, text_.before(position));
  uint32_t node = kRoot, at = 0;
  while (at < length) {
    const uint32_t child = nodes_.find(node, token[-1 - static_cast<int32_t>(at)]);
    Node& found = nodes_[child];
    at = found.depth;
    if (--found.count == 0) {
      nodes_.remove(child);
      break;
    }
    forget(child, *token);
    node = child;
  }
  if (node != kRoot) merge(node);
}

uint32_t ContextTree::locate(const int32_t* end, uint32_t length, Match* path) const {
  length = std::min(length, max_depth_);
  uint32_t found = 0, node = kRoot, depth = 0;
  while (depth < length) {
    node = nodes_.find(node, end[-1 - static_cast<int32_t>(depth)]);
    if (node == kNone) break;
    const Node& child = nodes_[node];
    const int32_t* example = text_.at(child.position);
    const uint32_t stop = std::min(child.depth, length);
    for (++depth; depth < stop; ++depth)
      if (example[-1 - static_cast<int32_t>(depth)] != end[-1 - static_cast<int32_t>(depth)]) break;
    if (child.kinds > 1) prefetch(&entries_[child.newest]);
    path[found++] = {node, depth, child.count == 1 ? child.position : kNone};
    if (depth < child.depth) break;
  }
  return found;
}

Match ContextTree::longest(const int32_t* end, uint32_t length) const {
  Match path[kMaxDepth];
  const uint32_t found = locate(end, length, path);
  return found ? path[found - 1] : Match{kNone, 0, kNone};
}

Follower ContextTree::first(const Match& match) const {
  if (match.position != kNone) return {*text_.at(match.position), 1, kNone};
  const Node& asked = nodes_[match.node];
  return asked.kinds == 1 ? Follower{asked.only, asked.count, kNone} : follower(asked.newest);
}

// The entry of `node`, which has some, for `token`. Most nodes have few, and most followers were seen lately: that
// saves the table.
uint32_t ContextTree::entry_of(uint32_t node, int32_t token) const {
  const Node& owner = nodes_[node];
  uint32_t entry = owner.newest;
  for (uint32_t tried = 0; tried < std::min(owner.kinds, kNear); ++tried) {
    if (entries_[entry].token == token) return entry;
    entry = entries_[entry].older;
  }
  return owner.kinds <= kNear ? kNone : entries_.find(node, token);
}

// Make `token` the most recent follower of `node`, which has no entry for it; `kinds` is the caller's to count.
void ContextTree::add_entry(uint32_t node, int32_t token, uint32_t count) {
  const uint32_t made = entries_.add(node, token);
  Node& owner = nodes_[node];
  Entry& entry = entries_[made];
  entry.count = count;
  entry.newer = kNone;
  entry.older = owner.newest;
  if (owner.newest != kNone) entries_[owner.newest].newer = made;
  owner.newest = made;
}

void ContextTree::drop_entry(uint32_t node, uint32_t entry) {
  Node& owner = nodes_[node];
  const Entry& gone = entries_[entry];
  (gone.newer == kNone ? owner.newest : entries_[gone.newer].older) = gone.older;
  if (gone.older != kNone) entries_[gone.older].newer = gone.newer;
  entries_.remove(entry);
}

// `node` occurred once more.
void ContextTree::record(uint32_t node, uint32_t position) {
  Node& owner = nodes_[node];
  const int32_t token = *text_.at(position);
  const uint32_t before = owner.count++;
  owner.position = position;
  if (owner.kinds == 1) {
    if (owner.only == token) return;
    const int32_t only = owner.only;
    owner.newest = kNone;
    add_entry(node, only, before);
    add_entry(node, token, 1);
    owner.kinds = 2;
    return;
  }
  const uint32_t found = entry_of(node, token);
  if (found == kNone) {
    add_entry(node, token, 1);
    ++owner.kinds;
    return;
  }
  Entry& entry = entries_[found];
  ++entry.count;
  if (owner.newest == found) return;
  entries_[entry.newer].older = entry.older;
  if (entry.older != kNone) entries_[entry.older].newer = entry.newer;
  entry.newer = kNone;
  entry.older = owner.newest;
  entries_[owner.newest].newer = found;
  owner.newest = found;
}

// `token` followed `node`, whose count is lower already, once less.
void ContextTree::forget(uint32_t node, int32_t token) {
  Node& owner = nodes_[node];
  if (owner.kinds == 1) return;
  const uint32_t entry = entry_of(node, token);
  if (--entries_[entry].count) return;
  drop_entry(node, entry);
  if (--owner.kinds > 1) return;
  const uint32_t last = owner.newest;
  owner.only = entries_[last].token;
  entries_.remove(last);
}

// The contexts of `node` of up to `depth` tokens occurred once more, at `position`, the longer ones did not.
uint32_t ContextTree::split(uint32_t node, uint32_t depth, uint32_t position) {
  const uint32_t owner = nodes_[node].owner;
  const int32_t token = nodes_[node].token;
  nodes_.rename(node, kNone, 0);  // out of the way: the upper part takes its key
  const uint32_t upper = nodes_.add(owner, token);
  const Node& lower = nodes_[node];
  Node& made = nodes_[upper];
  const int32_t* example = text_.at(lower.position);
  made.count = lower.count;
  made.kinds = lower.kinds;
  made.depth = depth;
  if (lower.kinds == 1) {
    made.only = lower.only;
  } else {
    made.newest = kNone;
    uint32_t oldest = lower.newest;
    while (entries_[oldest].older != kNone) oldest = entries_[oldest].older;
    for (uint32_t i = oldest; i != kNone; i = entries_[i].newer) add_entry(upper, entries_[i].token, entries_[i].count);
  }
  record(upper, position);
  nodes_.rename(node, upper, example[-1 - static_cast<int32_t>(depth)]);
  return upper;
}

// Remove `node` where its one child has the same occurrences.
void ContextTree::merge(uint32_t node) {
  Node& upper = nodes_[node];
  if (upper.depth >= std::min(max_depth_, text_.before(upper.position))) return;
  const uint32_t child = nodes_.find(node, text_.at(upper.position)[-1 - static_cast<int32_t>(upper.depth)]);
  if (child == kNone || nodes_[child].count != upper.count) return;
  if (upper.kinds > 1)
    while (upper.newest != kNone) drop_entry(node, upper.newest);
  const uint32_t owner = upper.owner;
  const int32_t token = upper.token;
  nodes_.remove(node);
  nodes_.rename(child, owner, token);
}

}  // namespace ngram
