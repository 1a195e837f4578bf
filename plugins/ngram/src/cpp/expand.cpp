#include "expand.hpp"

#include <algorithm>
#include <cmath>

namespace ngram {

namespace {

// Followers of a context among which the most frequent are looked for, the most recent ones; bounds the cost after
// very common tokens.
constexpr uint32_t kScan = 32;

// Weight of "something new follows" after a match of m tokens: kScale / m ^ kPower for each kind of follower seen, in
// the text itself and in what others said, which says less. Fitted to chats (benchmarks/acceptance.py).
constexpr double kScale[2] = {3.0, 12.0}, kPower[2] = {1.3, 1.0};

// Of what the followers share, the part that goes to the most recent one, then of the rest to the next, ...
constexpr double kRecency = 0.6;

}  // namespace

Expander::Expander(const Options& options)
    : options_(options),
      narrowing_((double(options.max_breadth) - options.min_breadth) / std::max(1u, options.max_depth - 1)) {
  for (int others = 0; others < 2; ++others) {
    novelty_[others].assign(options.max_depth + 1, 0.0);
    for (uint32_t matched = 1; matched <= options.max_depth; ++matched)
      novelty_[others][matched] = kScale[others] / std::pow(double(matched), kPower[others]);
  }
}

uint32_t Expander::expand(const Sources& sources, const int32_t* end, uint32_t length, uint32_t budget,
                          uint32_t reserved, uint32_t depth, int64_t* tokens, int64_t* parents) {
  if (!budget || !depth) return 0;
  trees_ = sources;
  heap_.clear();
  waiting_.clear();
  drafted_.clear();
  root_child_ = -1;
  serial_ = 0;
  offer_anchors(end, length);

  uint32_t count = 0;
  uint32_t left[2] = {budget - reserved, reserved};  // nodes that texts may take, and the corpus
  double gain = 0.0;  // drafts expected to be accepted
  while (count < budget) {
    if (heap_.empty()) {
      // What is left of the corpus's share.
      if (waiting_.empty()) break;
      left[0] = budget - count;
      heap_.swap(waiting_);
      std::make_heap(heap_.begin(), heap_.end(), later);
    }
    const Candidate best = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), later);
    heap_.pop_back();
    int32_t node = first_child(best.parent);
    while (node >= 0 && tokens[node] != best.token) node = drafted_[node].sibling;
    const uint32_t bit = 1u << best.source;
    if (node >= 0) {
      // A shorter match says what a longer one said; but another source may know more of what comes then.
      if (drafted_[node].sources & bit) continue;
      drafted_[node].sources |= bit;
    } else {
      uint32_t& share = left[best.source == kCorpus];
      if (!share) {
        if (best.source != kCorpus) waiting_.push_back(best);
        continue;
      }
      --share;
      gain += best.confidence;
      node = static_cast<int32_t>(count++);
      tokens[node] = best.token;
      parents[node] = best.parent;
      drafted_.push_back({-1, first_child(best.parent), bit});
      first_child(best.parent) = node;
    }
    if (best.level < depth) {
      const Match next = follow(best, node, end, tokens, parents);
      const double breadth = std::max(1.0, best.breadth - narrowing_);
      if (next.length) offer(best.source, next, best.confidence, best.level + 1, node, breadth);
    }
  }
  return gain >= options_.min_gain ? count : 0;
}

// The order of the heap: likelier, then nearer to the root, then discovered earlier.
bool Expander::later(const Candidate& a, const Candidate& b) {
  if (a.confidence != b.confidence) return a.confidence < b.confidence;
  if (a.level != b.level) return a.level > b.level;
  return a.serial > b.serial;
}

// Push what followed the contexts that the text ends with, longest first, of equals the closest source first. A chain
// follows the longest only.
void Expander::offer_anchors(const int32_t* end, uint32_t length) {
  Match paths[kSources][ContextTree::kMaxDepth];
  uint32_t left[kSources];
  for (uint32_t s = 0; s < kSources; ++s) left[s] = trees_[s] ? trees_[s]->locate(end, length, paths[s]) : 0;
  double novel = 1.0;  // probability that no longer match knows what comes
  for (;;) {
    uint32_t source = kSources;
    for (uint32_t s = 0; s < kSources; ++s) {
      if (!left[s]) continue;
      if (source == kSources || paths[s][left[s] - 1].length > paths[source][left[source] - 1].length) source = s;
    }
    if (source == kSources) break;
    const Match context = paths[source][--left[source]];
    if (context.length < options_.min_match) break;
    // Long matches are narrow, short ones wide (SGLang's rule).
    const double depth = options_.max_depth - 1;
    const double breadth = options_.min_breadth + std::max(0.0, depth - context.length) * narrowing_;
    offer(source, context, novel, 1, -1, breadth);
    novel *= unseen(source, context);
    if (options_.max_breadth == 1 || novel < options_.min_confidence) break;
  }
}

// Push the best of what followed `context` as children of `parent`.
void Expander::offer(uint32_t source, const Match& context, double confidence, uint32_t level, int32_t parent,
                     double breadth) {
  const ContextTree& tree = *trees_[source];
  const uint32_t kinds = tree.kinds(context), total = tree.count(context);
  const double share = confidence / (total + novelty(source, context));
  const uint32_t most = std::min(kinds, static_cast<uint32_t>(breadth));
  const auto push = [&](const Follower& follower, double estimate) {
    if (estimate < options_.min_confidence) return false;
    heap_.push_back({estimate, level, serial_++, follower.token, parent, context, source, breadth});
    std::push_heap(heap_.begin(), heap_.end(), later);
    return true;
  };
  Follower follower = tree.first(context);
  if (!options_.by_count) {
    double rest = share * total;
    for (uint32_t rank = 0;;) {
      const double estimate = rank + 1 < kinds ? rest * kRecency : rest;
      rest -= estimate;
      if (!push(follower, estimate) || ++rank == most) return;
      follower = tree.next(follower);
    }
  }
  Follower seen[kScan] = {follower};
  const uint32_t found = std::min(kinds, kScan);
  for (uint32_t i = 1; i < found; ++i) seen[i] = tree.next(seen[i - 1]);
  // Stable: the more recent first among equals.
  std::stable_sort(seen, seen + found, [](const Follower& a, const Follower& b) { return a.count > b.count; });
  for (uint32_t rank = 0; rank < std::min(most, found); ++rank)
    if (!push(seen[rank], share * seen[rank].count)) return;
}

// Estimated probability that `context` is followed by something new to it. The form is that of prediction by partial
// matching (method C, Moffat 1990, has weight 1): each kind of follower seen so far counts for novelty, the less the
// longer the match.
double Expander::unseen(uint32_t source, const Match& context) const {
  const double weight = novelty(source, context);
  return weight / (weight + trees_[source]->count(context));
}

// The longest known context that ends with `node`, at most one token longer than the one it was found with. A context
// that occurred once is followed through its text, however long it gets; others count by their last tokens.
Match Expander::follow(const Candidate& taken, int32_t node, const int32_t* end, const int64_t* tokens,
                       const int64_t* parents) {
  if (taken.context.position != kNone) {
    const Match longer = trees_[taken.source]->longer(taken.context);
    if (longer.length) return longer;
  }
  int32_t context[ContextTree::kMaxDepth];
  int32_t* const last = context + ContextTree::kMaxDepth;
  const uint32_t length = std::min(taken.context.length + 1, options_.max_depth);
  int32_t* first = last;
  for (; node >= 0 && static_cast<uint32_t>(last - first) < length; node = static_cast<int32_t>(parents[node]))
    *--first = static_cast<int32_t>(tokens[node]);
  const uint32_t rest = length - static_cast<uint32_t>(last - first);
  std::copy(end - rest, end, first - rest);
  return trees_[taken.source]->longest(last, length);
}

}  // namespace ngram
