// Texts remembered under one bound: the oldest tokens are forgotten first.
#pragma once

#include <cstdint>

#include "memory.hpp"
#include "tree.hpp"
#include "window.hpp"

namespace ngram {

class History {
 public:
  // `bound` in bytes, this object included.
  History(size_t bound, uint32_t max_depth)
      : budget_(bound), window_(budget_, max_depth), tree_(budget_, window_, max_depth) {
    budget_.take(sizeof(History));
  }

  // Continue the text of `cursor`; false where `token` is not remembered. It is context for what follows in any case.
  bool append(Cursor& cursor, int32_t token, bool may_forget = true) {
    const bool kept = keep(cursor, token, may_forget);
    cursor.push(token);
    return kept;
  }
  // The text of `cursor` is complete; what it said stays.
  void close(Cursor& cursor) { window_.close(cursor); }

  const ContextTree& tree() const { return tree_; }
  size_t bytes() const { return budget_.used(); }
  size_t tokens() const { return window_.kept(); }
  uint64_t forgotten() const { return forgotten_; }

 private:
  bool keep(Cursor& cursor, int32_t token, bool may_forget) {
    while (!window_.reserve(cursor))
      if (!may_forget || !forget()) return false;
    const uint32_t position = window_.write(cursor, token);
    while (!tree_.insert(position))
      if (!may_forget || !forget()) return false;
    window_.keep(position);
    return true;
  }
  bool forget() {
    if (window_.empty()) return false;
    tree_.remove(window_.oldest());
    window_.drop_oldest();
    ++forgotten_;
    return true;
  }

  Budget budget_;
  Window window_;
  ContextTree tree_;
  uint64_t forgotten_ = 0;
};

}  // namespace ngram
