// The tokens that are remembered, and in which order they came.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory.hpp"

namespace ngram {

// Where a text that is being written ends. Keeps the last `context` tokens whatever the window forgets.
class Cursor {
 public:
  explicit Cursor(uint32_t context) : context_(context), tail_(2 * size_t{context}) {}

  void push(int32_t token) {
    if (filled_ == tail_.size()) {
      std::copy(tail_.end() - context_, tail_.end(), tail_.begin());
      filled_ = context_;
    }
    tail_[filled_++] = token;
    ++seen;
  }
  // One past the last token; the `length` tokens before it can be read.
  const int32_t* end() const { return tail_.data() + filled_; }
  uint32_t length() const { return static_cast<uint32_t>(std::min<uint64_t>(seen, context_)); }
  size_t bytes() const { return tail_.capacity() * sizeof(int32_t); }
  void reset() {
    filled_ = 0;
    seen = 0;
    block = kNone;
  }

  uint64_t seen = 0;       // tokens of the text so far
  uint32_t block = kNone;  // block that is being written, and
  uint32_t offset = 0;     // where its next token goes

 private:
  uint32_t context_;
  std::vector<int32_t> tail_;
  size_t filled_ = 0;
};

// Texts in blocks. A block starts with a copy of the tokens before it, so that the context of each of its
// tokens lies in the block: blocks are forgotten independently of each other.
class Window {
 public:
  Window(Budget& budget, uint32_t context)
      : budget_(budget),
        context_(context),
        log_(context <= 64 ? 8 : 9),
        blocks_(budget),
        free_(budget),
        runs_(budget) {}
  ~Window() {
    for (size_t i = 0; i < blocks_.size(); ++i)
      if (blocks_[i].tokens) budget_.give(block_bytes());
  }

  // The token at `position`; those before it are its context, `before(position)` of them.
  const int32_t* at(uint32_t position) const {
    return blocks_[position >> log_].tokens.get() + (position & ((1u << log_) - 1));
  }
  uint32_t before(uint32_t position) const {
    const uint32_t written = (position & ((1u << log_) - 1)) - context_;
    return std::min(context_, blocks_[position >> log_].before + written);
  }

  // The position after `position` in its text, kNone at the end. What is newer is forgotten later, so it is there.
  uint32_t after(uint32_t position) const {
    const uint32_t block = position >> log_;
    if ((position + 1) < blocks_[block].end) return position + 1;
    const uint32_t next = blocks_[block].next;
    return next != kNone && blocks_[next].end > (next << log_ | context_) ? next << log_ | context_ : kNone;
  }

  // Make sure that `write` and `keep` can follow; false where the budget does not allow it.
  bool reserve(Cursor& cursor) {
    if (!runs_.reserve(1)) return false;
    if (cursor.block != kNone && cursor.offset < (1u << log_)) return true;
    const uint32_t full = cursor.block;
    if (!open(cursor)) return false;
    if (full != kNone) {
      blocks_[full].next = cursor.block;
      shut(full);
    }
    return true;
  }
  // Returns the position of `token`, which counts once `keep` is told of it.
  uint32_t write(Cursor& cursor, int32_t token) {
    blocks_[cursor.block].tokens[cursor.offset] = token;
    return cursor.block << log_ | cursor.offset++;
  }
  void keep(uint32_t position) {
    Block& block = blocks_[position >> log_];
    ++block.live;
    block.end = position + 1;
    ++kept_;
    if (newest_ != kNone && runs_[newest_].start + runs_[newest_].length == position &&
        (runs_[newest_].start >> log_) == (position >> log_)) {
      ++runs_[newest_].length;
      return;
    }
    const uint32_t run = runs_.take();
    runs_[run] = {kNone, position, 1};
    (newest_ == kNone ? oldest_ : runs_[newest_].next) = run;
    newest_ = run;
  }
  // The text will not be continued in this block.
  void close(Cursor& cursor) {
    if (cursor.block != kNone) shut(cursor.block);
    cursor.block = kNone;
  }

  bool empty() const { return oldest_ == kNone; }
  uint32_t oldest() const { return runs_[oldest_].start; }
  void drop_oldest() {
    Run& run = runs_[oldest_];
    const uint32_t block = run.start >> log_;
    --blocks_[block].live;
    --kept_;
    ++run.start;
    if (--run.length == 0) {
      const uint32_t gone = oldest_;
      oldest_ = run.next;
      if (oldest_ == kNone) newest_ = kNone;
      runs_.give(gone);
    }
    release(block);
  }
  size_t kept() const { return kept_; }

 private:
  struct Block {
    std::unique_ptr<int32_t[]> tokens;
    uint32_t before;  // tokens of the text in front of the block that it has a copy of
    uint32_t live;    // kept positions
    uint32_t end;     // one past the last position
    uint32_t next;    // block in which the text goes on
    bool open;        // its text may be continued in it
  };
  struct Run {  // consecutive positions of one block that came one after the other
    uint32_t next, start, length;
  };

  size_t block_bytes() const { return (size_t{1} << log_) * sizeof(int32_t); }
  bool open(Cursor& cursor) {
    // `free_` is grown here, so that giving a block back never needs memory.
    size_t bytes = block_bytes();
    if (!free_count_) bytes += blocks_.growth() + free_.growth();
    if (!budget_.fits(bytes)) return false;
    std::unique_ptr<int32_t[]> tokens(new int32_t[size_t{1} << log_]);
    uint32_t block;
    if (free_count_) {
      block = free_[--free_count_];
    } else {
      block = static_cast<uint32_t>(blocks_.size());
      blocks_.push({});
      free_.push(kNone);
    }
    const uint32_t before = cursor.length();
    std::copy(cursor.end() - before, cursor.end(), tokens.get() + context_ - before);
    blocks_[block] = {std::move(tokens), before, 0, block << log_ | context_, kNone, true};
    budget_.take(block_bytes());
    cursor.block = block;
    cursor.offset = context_;
    return true;
  }
  void shut(uint32_t block) {
    blocks_[block].open = false;
    release(block);
  }
  void release(uint32_t block) {
    if (blocks_[block].live || blocks_[block].open) return;
    blocks_[block].tokens.reset();
    budget_.give(block_bytes());
    free_[free_count_++] = block;
  }

  Budget& budget_;
  uint32_t context_;
  unsigned log_;  // of the tokens of a block, its copied context included
  CountedVector<Block> blocks_;
  CountedVector<uint32_t> free_;
  size_t free_count_ = 0;
  Pool<Run> runs_;
  uint32_t oldest_ = kNone, newest_ = kNone;
  size_t kept_ = 0;
};

}  // namespace ngram
