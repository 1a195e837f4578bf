// Memory that is counted to the byte: a budget, pools of fixed-size items, and items found by key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace ngram {

constexpr uint32_t kNone = UINT32_MAX;

// Have memory at hand that will be read soon: histories are larger than caches, and waiting for memory is the cost.
inline void prefetch(const void* address) {
#if defined(__GNUC__) || defined(__clang__)
  __builtin_prefetch(address);
#else
  static_cast<void>(address);
#endif
}

// What may be allocated, and what is. Counts payload bytes, not what the allocator adds to a block.
class Budget {
 public:
  explicit Budget(size_t bound) : bound_(bound) {}
  bool fits(size_t bytes) const { return used_ <= bound_ && bytes <= bound_ - used_; }
  void take(size_t bytes) { used_ += bytes; }
  void give(size_t bytes) { used_ -= bytes; }
  size_t used() const { return used_; }

 private:
  size_t bound_;
  size_t used_ = 0;
};

// A vector whose memory comes out of a budget. While it grows, old and new memory count.
template <class T>
class CountedVector {
 public:
  explicit CountedVector(Budget& budget) : budget_(budget) {}
  CountedVector(const CountedVector&) = delete;
  ~CountedVector() { budget_.give(items_.capacity() * sizeof(T)); }

  // Bytes that the next `push` takes, beyond what it is given for the item itself.
  size_t growth() const { return items_.size() < items_.capacity() ? 0 : next_capacity() * sizeof(T); }
  void push(T item) {
    if (items_.size() == items_.capacity()) {
      const size_t before = items_.capacity();
      items_.reserve(next_capacity());
      budget_.take((items_.capacity() - before) * sizeof(T));
    }
    items_.push_back(std::move(item));
  }
  T& operator[](size_t i) { return items_[i]; }
  const T& operator[](size_t i) const { return items_[i]; }
  size_t size() const { return items_.size(); }

 private:
  size_t next_capacity() const { return items_.capacity() ? 2 * items_.capacity() : 8; }

  Budget& budget_;
  std::vector<T> items_;
};

// Items of one size at stable indices, in chunks. What is given back is used again, not freed.
template <class T, unsigned kLog = 7>
class Pool {
 public:
  explicit Pool(Budget& budget) : budget_(budget), chunks_(budget) {}
  ~Pool() { budget_.give(chunks_.size() * kChunk * sizeof(T)); }

  T& operator[](uint32_t i) { return chunks_[i >> kLog][i & (kChunk - 1)]; }
  const T& operator[](uint32_t i) const { return chunks_[i >> kLog][i & (kChunk - 1)]; }

  // Make sure that `count` items can be taken; false where the budget does not allow it.
  bool reserve(size_t count) {
    while (chunks_.size() * kChunk - taken_ < count) {
      if (chunks_.size() >= (size_t{kNone} >> kLog)) return false;
      if (!budget_.fits(kChunk * sizeof(T) + chunks_.growth())) return false;
      std::unique_ptr<T[]> chunk(new T[kChunk]);
      chunks_.push(std::move(chunk));
      budget_.take(kChunk * sizeof(T));
    }
    return true;
  }
  // After a successful `reserve`.
  uint32_t take() {
    ++taken_;
    if (free_ == kNone) return fresh_++;
    const uint32_t item = free_;
    std::memcpy(&free_, static_cast<void*>(&(*this)[item]), sizeof free_);
    return item;
  }
  void give(uint32_t item) {
    --taken_;
    std::memcpy(static_cast<void*>(&(*this)[item]), &free_, sizeof free_);
    free_ = item;
  }
  size_t taken() const { return taken_; }

 private:
  static constexpr size_t kChunk = size_t{1} << kLog;

  Budget& budget_;
  CountedVector<std::unique_ptr<T[]>> chunks_;
  uint32_t free_ = kNone;  // head of the list of items given back, linked through their first bytes
  uint32_t fresh_ = 0;     // first item that was never taken
  size_t taken_ = 0;
};

// A pool whose items are found by (owner, token), their fields of that name, chained through `next`.
// Linear hashing (Litwin, 1980): the table grows by one bucket at a time, so that no insertion pays for all.
template <class T>
class Keyed {
 public:
  explicit Keyed(Budget& budget) : budget_(budget), items_(budget), buckets_(budget) { grow_chunk(); }
  ~Keyed() { budget_.give(buckets_.size() * kChunk * sizeof(uint32_t)); }

  T& operator[](uint32_t i) { return items_[i]; }
  const T& operator[](uint32_t i) const { return items_[i]; }
  bool reserve(size_t count) { return items_.reserve(count); }
  size_t size() const { return items_.taken(); }

  uint32_t find(uint32_t owner, int32_t token) const {
    uint32_t i = bucket(place(hash(owner, token)));
    while (i != kNone && (items_[i].owner != owner || items_[i].token != token)) i = items_[i].next;
    return i;
  }
  // After a successful `reserve`. The rest of the item is the caller's to fill.
  uint32_t add(uint32_t owner, int32_t token) {
    const uint32_t i = items_.take();
    link(i, owner, token);
    if (items_.taken() > size_) split();
    return i;
  }
  void remove(uint32_t i) {
    unlink(i);
    items_.give(i);
  }
  void rename(uint32_t i, uint32_t owner, int32_t token) {
    unlink(i);
    link(i, owner, token);
  }

 private:
  static constexpr unsigned kLog = 10;
  static constexpr size_t kChunk = size_t{1} << kLog;

  static uint32_t hash(uint32_t owner, int32_t token) {
    const uint64_t key = (uint64_t{owner} << 32 | static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    return static_cast<uint32_t>(key >> 32);
  }
  uint32_t& bucket(size_t i) { return buckets_[i >> kLog][i & (kChunk - 1)]; }
  uint32_t bucket(size_t i) const { return buckets_[i >> kLog][i & (kChunk - 1)]; }
  size_t place(uint32_t hashed) const {
    const size_t wide = hashed & (2 * low_ - 1);
    return wide < size_ ? wide : hashed & (low_ - 1);
  }
  void link(uint32_t i, uint32_t owner, int32_t token) {
    uint32_t& head = bucket(place(hash(owner, token)));
    T& item = items_[i];
    item.owner = owner;
    item.token = token;
    item.next = head;
    head = i;
  }
  void unlink(uint32_t i) {
    uint32_t* at = &bucket(place(hash(items_[i].owner, items_[i].token)));
    while (*at != i) at = &items_[*at].next;
    *at = items_[i].next;
  }
  void grow_chunk() {
    std::unique_ptr<uint32_t[]> chunk(new uint32_t[kChunk]);
    buckets_.push(std::move(chunk));
    budget_.take(kChunk * sizeof(uint32_t));
    std::memset(buckets_[buckets_.size() - 1].get(), 0xFF, kChunk * sizeof(uint32_t));
  }
  // Add a bucket, if the budget allows; chains only get longer where it does not.
  void split() {
    if (size_ == buckets_.size() * kChunk) {
      if (!budget_.fits(kChunk * sizeof(uint32_t) + buckets_.growth())) return;
      grow_chunk();
    }
    uint32_t* at = &bucket(size_ - low_);
    uint32_t& moved = bucket(size_);
    while (*at != kNone) {
      T& item = items_[*at];
      if ((hash(item.owner, item.token) & (2 * low_ - 1)) == size_) {
        const uint32_t i = *at;
        *at = item.next;
        item.next = moved;
        moved = i;
      } else {
        at = &item.next;
      }
    }
    if (++size_ == 2 * low_) low_ = size_;
  }

  Budget& budget_;
  Pool<T> items_;
  CountedVector<std::unique_ptr<uint32_t[]>> buckets_;
  size_t size_ = kChunk;  // buckets in use
  size_t low_ = kChunk;   // greatest power of two that is not above `size_`
};

}  // namespace ngram
