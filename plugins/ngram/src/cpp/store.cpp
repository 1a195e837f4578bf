#include "store.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ngram {

Store::Store(const Options& options, const Sizes& sizes) : options_(options), sizes_(sizes), expander_(options) {
  if (options.max_depth < 1 || options.max_depth > ContextTree::kMaxDepth)
    throw std::invalid_argument("max_depth must be 1 to " + std::to_string(ContextTree::kMaxDepth));
  if (sizes.slots < 1) throw std::invalid_argument("slots must be at least 1");
  if (sizes.corpus_nodes > sizes.nodes) throw std::invalid_argument("corpus_nodes must be at most nodes");
  slots_.reserve(sizes.slots);
  for (uint32_t i = 0; i < sizes.slots; ++i) slots_.emplace_back(options.max_depth);
  const size_t histories = size_t{sizes.slots} * (sizes.shared ? 2 : 1) + (sizes.corpus_nodes ? 1 : 0);
  if (sizes.bytes < fixed_bytes() + histories * kLeast)
    throw std::invalid_argument("bytes must be at least " + std::to_string(fixed_bytes() + histories * kLeast));
  if (sizes.corpus_nodes) {
    // At least the least is left to the requests.
    corpus_ = std::make_unique<History>(sizes.bytes - fixed_bytes() - (histories - 1) * kLeast, options.max_depth);
    reader_.emplace(options.max_depth);
  }
}

bool Store::add_document(const std::vector<int32_t>& tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!reader_) throw std::logic_error("no corpus can be added any more");
  for (const int32_t token : tokens)
    if (!corpus_->append(*reader_, token, false)) return false;
  corpus_->close(*reader_);
  reader_->reset();
  return true;
}

void Store::admit(uint32_t index, uint64_t known) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (index >= slots_.size()) throw std::out_of_range("no such slot");
  Slot& slot = slots_[index];
  if (slot.own) throw std::logic_error("the slot holds a text");
  reader_.reset();
  // What the corpus leaves: half to the shared history, the rest to the slots in equal parts.
  size_t left = sizes_.bytes - fixed_bytes() - (corpus_ ? corpus_->bytes() : 0);
  if (sizes_.shared) {
    left /= 2;
    if (!shared_) shared_ = std::make_unique<History>(left, options_.max_depth);
  }
  slot.own = std::make_unique<History>(left / slots_.size(), options_.max_depth);
  slot.text.reset();
  slot.said.reset();
  slot.known = known;
}

std::pair<uint64_t, std::vector<int32_t>> Store::release(uint32_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (index >= slots_.size()) throw std::out_of_range("no such slot");
  Slot& slot = slots_[index];
  if (!slot.own) return {0, {}};
  const Cursor& text = slot.text;
  std::pair<uint64_t, std::vector<int32_t>> ended{text.seen, {text.end() - text.length(), text.end()}};
  if (shared_) shared_->close(slot.said);
  forgotten_ += slot.own->forgotten();
  slot.own.reset();
  return ended;
}

void Store::insert(const std::vector<uint32_t>& slots, const std::vector<std::vector<int32_t>>& tokens) {
  if (slots.size() != tokens.size()) throw std::invalid_argument("one list of tokens for each slot");
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t row = 0; row < slots.size(); ++row) {
    Slot& slot = busy(slots[row]);
    for (const int32_t token : tokens[row]) slot.own->append(slot.text, token);
    if (!shared_) continue;
    for (const int32_t token : tokens[row]) {
      if (slot.said.seen < slot.known) {
        slot.said.push(token);
      } else {
        shared_->append(slot.said, token);
      }
    }
  }
}

void Store::propose(const std::vector<uint32_t>& slots, const std::vector<int64_t>& limits, uint32_t depth,
                    int64_t* tokens, int64_t* parents, size_t stride, int64_t* valid, size_t rows) {
  if (slots.size() != limits.size()) throw std::invalid_argument("one limit for each slot");
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t most = static_cast<int64_t>(std::min<size_t>(sizes_.nodes, stride));
  const ContextTree* shared = shared_ ? &shared_->tree() : nullptr;
  const ContextTree* corpus = corpus_ ? &corpus_->tree() : nullptr;
  for (size_t row = 0; row < slots.size(); ++row) {
    if (limits[row] < 1) continue;
    const Slot& slot = busy(slots[row]);
    if (slots[row] >= rows) throw std::out_of_range("no such row");
    const uint32_t budget = static_cast<uint32_t>(std::min(limits[row], most));
    // A row that may draft less gives the corpus less, in proportion.
    const uint64_t reserved = budget ? uint64_t{sizes_.corpus_nodes} * budget / sizes_.nodes : 0;
    const Sources sources{&slot.own->tree(), shared, corpus};
    const size_t start = slots[row] * stride;
    const uint32_t found = expander_.expand(sources, slot.text.end(), slot.text.length(), budget,
                                            static_cast<uint32_t>(reserved), depth, tokens + start, parents + start);
    valid[slots[row]] = found;
    ++lookups_;
    declined_ += found == 0;
  }
}

Stats Store::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stats sum{lookups_, declined_, 0, forgotten_, fixed_bytes(), 0, 0};
  const auto add = [&sum](const History* history) {
    if (!history) return;
    sum.tokens += history->tokens();
    sum.forgotten += history->forgotten();
    sum.bytes += history->bytes();
    sum.nodes += history->tree().nodes();
    sum.entries += history->tree().entries();
  };
  add(corpus_.get());
  add(shared_.get());
  for (const Slot& slot : slots_) add(slot.own.get());
  return sum;
}

Stats Store::held(uint32_t slot, uint32_t source) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const History& asked = history(slot, source);
  return {0, 0, asked.tokens(), asked.forgotten(), asked.bytes(), asked.tree().nodes(), asked.tree().entries()};
}

std::vector<std::pair<int32_t, uint32_t>> Store::followers(uint32_t slot, const std::vector<int32_t>& context,
                                                           uint32_t source) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const ContextTree& tree = history(slot, source).tree();
  const uint32_t length = static_cast<uint32_t>(context.size());
  const Match match = tree.longest(context.data() + length, length);
  if (!length || match.length != length) return {};
  std::vector<std::pair<int32_t, uint32_t>> pairs;
  Follower follower = tree.first(match);
  for (uint32_t i = tree.kinds(match);;) {
    pairs.emplace_back(follower.token, follower.count);
    if (--i == 0) return pairs;
    follower = tree.next(follower);
  }
}

std::vector<std::pair<uint32_t, uint32_t>> Store::anchors(uint32_t slot, uint32_t source) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const ContextTree& tree = history(slot, source).tree();
  const Cursor& text = busy(slot).text;
  Match path[ContextTree::kMaxDepth];
  const uint32_t found = tree.locate(text.end(), text.length(), path);
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  for (uint32_t i = found; i-- > 0;) pairs.emplace_back(path[i].length, tree.count(path[i]));
  return pairs;
}

const Store::Slot& Store::busy(uint32_t slot) const {
  if (slot >= slots_.size() || !slots_[slot].own) throw std::out_of_range("the slot holds no text");
  return slots_[slot];
}

const History& Store::history(uint32_t slot, uint32_t source) const {
  const History* const known[kSources] = {busy(slot).own.get(), shared_.get(), corpus_.get()};
  if (source >= kSources || !known[source]) throw std::invalid_argument("no such source");
  return *known[source];
}

size_t Store::fixed_bytes() const {
  size_t bytes = sizeof(Store) + slots_.capacity() * sizeof(Slot);
  for (const Slot& slot : slots_) bytes += slot.text.bytes() + slot.said.bytes();
  return bytes;
}

}  // namespace ngram
