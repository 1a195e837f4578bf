// The texts of an engine's requests, by slot; what Python calls, once per step for all rows.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "expand.hpp"
#include "history.hpp"

namespace ngram {

struct Sizes {
  uint32_t slots;
  uint32_t nodes;         // most drafts per row
  uint32_t corpus_nodes;  // of these, reserved for the corpus
  uint64_t bytes;         // bound on all that is counted
  bool shared;            // keep a history of all requests too
};

struct Stats {
  uint64_t lookups, declined, tokens, forgotten, bytes, nodes, entries;
};

// Every method may be called from any thread.
class Store {
 public:
  // Least bytes of a history: what it holds when it is new, and room for one token after any other.
  static constexpr size_t kLeast = 64 << 10;

  Store(const Options& options, const Sizes& sizes);

  // Add a document to the corpus; false where the memory does not suffice. Before the first `admit` only.
  bool add_document(const std::vector<int32_t>& tokens);
  // Start a text. Its first `known` tokens are context only to the shared history, which has them already.
  void admit(uint32_t slot, uint64_t known);
  // End the text of `slot`. Returns its length and its last tokens.
  std::pair<uint64_t, std::vector<int32_t>> release(uint32_t slot);
  void insert(const std::vector<uint32_t>& slots, const std::vector<std::vector<int32_t>>& tokens);
  // For each row, write drafts to `tokens` and `parents` [rows, stride] and their number to `valid`, indexed by slot.
  void propose(const std::vector<uint32_t>& slots, const std::vector<int64_t>& limits, uint32_t depth, int64_t* tokens,
               int64_t* parents, size_t stride, int64_t* valid, size_t rows);
  Stats stats() const;
  // For tests, of the history `source` as `slot` sees it: its size; what followed `context`, most recent first; length
  // and occurrences of the contexts that the text ends with, longest first.
  Stats held(uint32_t slot, uint32_t source) const;
  std::vector<std::pair<int32_t, uint32_t>> followers(uint32_t slot, const std::vector<int32_t>& context,
                                                      uint32_t source) const;
  std::vector<std::pair<uint32_t, uint32_t>> anchors(uint32_t slot, uint32_t source) const;

 private:
  struct Slot {
    explicit Slot(uint32_t context) : text(context), said(context) {}
    std::unique_ptr<History> own;  // null where the slot holds no text
    Cursor text, said;             // where the text ends in the own and in the shared history
    uint64_t known = 0;
  };
  const Slot& busy(uint32_t slot) const;
  Slot& busy(uint32_t slot) { return const_cast<Slot&>(std::as_const(*this).busy(slot)); }
  const History& history(uint32_t slot, uint32_t source) const;
  size_t fixed_bytes() const;

  Options options_;
  Sizes sizes_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::unique_ptr<History> corpus_, shared_;
  std::optional<Cursor> reader_;  // of the corpus, while it is read
  Expander expander_;
  uint64_t lookups_ = 0, declined_ = 0, forgotten_ = 0;
};

}  // namespace ngram
