// The floor of the scheduler benchmarks: the memory work that cannot be avoided, and nothing else.
//
// A pool of published blocks with a hash table, token rows to compare and an LRU list, as any content-addressed prefix
// cache needs. It touches what the job needs: every token of a block is hashed and compared on a hit, and copied on
// publication; one table entry is inserted or erased; one list node is relinked. It leaves out what makes a cache safe
// and useful: requests, identity, levels, error checks, locks, counters, partial blocks, double-free protection. Memory
// is fetched ahead in a software pipeline and asked for in huge pages, because a floor that waits for each miss would
// flatter whoever is measured.
//
// Layout: 8-byte table slots {tag, id}, at most half full; 32-byte nodes; tokens at id * block_size. All functions work
// on `count` prompts of `blocks` blocks each: rows[i] points to prompt i's int32 tokens, ids is [count, blocks], and
// they return the nanoseconds that the work took.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include <sys/mman.h>

#include <algorithm>

#include "sha256.h"

namespace {

constexpr int32_t kNone = -1;
constexpr int64_t kAhead = 12;  // blocks between the stages of the pipeline; 8 to 24 measured the same

struct alignas(32) Node {
  uint64_t hash;
  int32_t parent, refs, prev, next;
};

struct Slot {
  uint32_t tag;
  int32_t id_plus_1;
};

inline uint64_t load(const void* from) {
  uint64_t word;
  std::memcpy(&word, from, 8);
  return word;
}

inline uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Zeroed memory in huge pages where the system gives them.
template <typename T>
class Pages {
 public:
  explicit Pages(size_t count) : count_(count) {
    void* memory = ::mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    ::madvise(memory, count * sizeof(T), MADV_HUGEPAGE);
#endif
    data_ = static_cast<T*>(memory);
  }
  ~Pages() { ::munmap(data_, count_ * sizeof(T)); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  size_t count_;
  T* data_;
};

class Stopwatch {
 public:
  double ns() const { return std::chrono::duration<double, std::nano>(Clock::now() - began_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point began_ = Clock::now();
};

}  // namespace

class Floor {
 public:
  Floor(int64_t pool, int64_t block_size)
      : size_(block_size),
        bits_(table_bits(pool)),
        shift_(32 - bits_),
        mask_((size_t{1} << bits_) - 1),
        slots_(mask_ + 1),
        nodes_(static_cast<size_t>(pool)),
        tokens_(static_cast<size_t>(pool * block_size)) {
    free_.reserve(static_cast<size_t>(pool));
    for (int64_t id = pool - 1; id >= 0; --id) free_.push_back(static_cast<int32_t>(id));
  }

  int64_t bytes() const {
    return static_cast<int64_t>(slots_.bytes() + nodes_.bytes() + free_.capacity() * sizeof(int32_t));
  }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }

  // Leading blocks of the row that are in the table; their ids go to out, hashes_ has the hash of each block.
  int64_t match(const int32_t* row, int64_t blocks, int32_t* out) {
    hashes_.resize(static_cast<size_t>(blocks));
    uint64_t chain = kSeed;
    int32_t parent = kNone;
    for (int64_t i = 0; i < blocks + 2 * kAhead; ++i) {
      if (i < blocks) {
        chain = hashes_[i] = hash(chain, row + i * size_);
        __builtin_prefetch(&slots_[home(chain)]);
      }
      const int64_t guess = i - kAhead;
      if (guess >= 0 && guess < blocks) {
        out[guess] = candidate(hashes_[guess]);
        if (out[guess] != kNone) prefetch(out[guess]);
      }
      const int64_t now = i - 2 * kAhead;
      if (now < 0) continue;
      int32_t id = out[now];
      if (id == kNone) return now;
      if (!is(id, parent, row + now * size_)) {
        id = find(hashes_[now], parent, row + now * size_);
        if (id == kNone) return now;
        out[now] = id;
      }
      parent = id;
    }
    return blocks;
  }

  void acquire(const int32_t* ids, int64_t blocks) {
    for (int64_t i = 0; i < blocks; ++i)
      if (nodes_[ids[i]].refs++ == 0) unlink(ids[i]);
  }

  void release(const int32_t* ids, int64_t blocks) {
    for (int64_t i = blocks - 1; i >= 0; --i) {
      if (i >= kAhead) __builtin_prefetch(&nodes_[ids[i - kAhead]], 1);
      if (--nodes_[ids[i]].refs == 0) link_last(ids[i]);
    }
  }

  void allocate(int32_t* ids, int64_t blocks) {
    for (int64_t i = 0; i < blocks; ++i) {
      ids[i] = free_.back();
      free_.pop_back();
    }
  }

  void give_back(const int32_t* ids, int64_t blocks) {
    for (int64_t i = blocks - 1; i >= 0; --i) free_.push_back(ids[i]);
  }

  void evict(int32_t* ids, int64_t blocks) {
    int32_t id = head_;
    for (int64_t i = 0; i < blocks; ++i) {
      ids[i] = id;
      __builtin_prefetch(&slots_[home(nodes_[id].hash)], 1);
      id = nodes_[id].next;
    }
    head_ = id;
    (id == kNone ? tail_ : nodes_[id].prev) = kNone;
    for (int64_t i = 0; i < blocks; ++i) erase(nodes_[ids[i]].hash, ids[i]);
  }

  // Make blocks [from, blocks) of the row findable under ids, held once. hashes_[0 .. hashed) are known already.
  void publish(const int32_t* row, int64_t from, int64_t blocks, const int32_t* ids, int64_t hashed) {
    hashes_.resize(static_cast<size_t>(blocks));
    for (int64_t i = from; i < blocks + kAhead; ++i) {
      if (i < blocks) {
        if (i >= hashed) hashes_[i] = hash(i ? hashes_[i - 1] : kSeed, row + i * size_);
        __builtin_prefetch(&slots_[home(hashes_[i])], 1);
        prefetch(ids[i]);
      }
      const int64_t now = i - kAhead;
      if (now < from) continue;
      insert(hashes_[now], ids[now]);
      std::memcpy(&tokens_[ids[now] * size_], row + now * size_, static_cast<size_t>(size_) * 4);
      nodes_[ids[now]] = Node{hashes_[now], now ? ids[now - 1] : kNone, 1, kNone, kNone};
    }
  }

  void life(const int32_t* row, int64_t blocks, int32_t* ids) {
    const int64_t found = match(row, blocks, ids);
    acquire(ids, found);
    take(ids + found, blocks - found);
    // the match stops at its first miss, having hashed up to two stages further
    publish(row, found, blocks, ids, std::min(blocks, found + 2 * kAhead + 1));
    release(ids, blocks);
  }

  // Blocks from the free list as long as it lasts, then evicted ones.
  void take(int32_t* ids, int64_t blocks) {
    const int64_t spare = std::min(blocks, num_free());
    allocate(ids, spare);
    if (blocks > spare) evict(ids + spare, blocks - spare);
  }

  // Chained digests of the row's blocks into out [blocks, 32]; digest(-1) is root.
  void digest(const int32_t* row, int64_t blocks, const uint8_t* root, uint8_t* out) {
    const size_t row_bytes = static_cast<size_t>(size_) * 4;
    message_.resize(36 + row_bytes + 72);
    std::memcpy(message_.data(), root, 32);
    std::memset(message_.data() + 32, 0, 4);
    for (int64_t i = 0; i < blocks; ++i, out += 32) {
      std::memcpy(message_.data() + 36, row + i * size_, row_bytes);
      floor_sha::sha256(message_.data(), 36 + row_bytes, out);
      std::memcpy(message_.data(), out, 32);
    }
  }

 private:
  static constexpr uint64_t kSeed = 0x9ae16a3b2f90404full;

  uint64_t hash(uint64_t chain, const int32_t* tokens) const {
    constexpr uint64_t k0 = 0xa0761d6478bd642full, k1 = 0xe7037ed1a0b428dbull, k2 = 0x8ebc6af09c88c6e3ull;
    const char* at = reinterpret_cast<const char*>(tokens);
    const char* end = at + size_ * 4;
    uint64_t a = k0, b = k1;
    for (; at + 32 <= end; at += 32) {
      a = fold(load(at) ^ a, load(at + 8) ^ k1);
      b = fold(load(at + 16) ^ b, load(at + 24) ^ k2);
    }
    for (; at < end; at += 4) {
      int32_t token;
      std::memcpy(&token, at, 4);
      a = fold(a ^ static_cast<uint32_t>(token), k2);
    }
    return fold(chain ^ a ^ (b << 1 | b >> 63), k0);
  }

  static uint32_t tag(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }
  size_t home(uint64_t hash) const { return tag(hash) >> shift_; }

  void prefetch(int32_t id) const {
    __builtin_prefetch(&nodes_[id], 1);
    const char* row = reinterpret_cast<const char*>(&tokens_[id * size_]);
    for (int64_t byte = 0; byte < size_ * 4; byte += 64) __builtin_prefetch(row + byte);
  }

  bool is(int32_t id, int32_t parent, const int32_t* tokens) const {
    const int32_t* mine = &tokens_[id * size_];
    uint64_t differ = static_cast<uint64_t>(nodes_[id].parent ^ parent);
    int64_t i = 0;
    for (; i + 2 <= size_; i += 2) differ |= load(mine + i) ^ load(tokens + i);
    for (; i < size_; ++i) differ |= static_cast<uint32_t>(mine[i] ^ tokens[i]);
    return differ == 0;
  }

  int32_t candidate(uint64_t hash) const {
    for (size_t i = home(hash); slots_[i].id_plus_1; i = (i + 1) & mask_)
      if (slots_[i].tag == tag(hash)) return slots_[i].id_plus_1 - 1;
    return kNone;
  }

  int32_t find(uint64_t hash, int32_t parent, const int32_t* tokens) const {
    for (size_t i = home(hash); slots_[i].id_plus_1; i = (i + 1) & mask_)
      if (slots_[i].tag == tag(hash) && is(slots_[i].id_plus_1 - 1, parent, tokens)) return slots_[i].id_plus_1 - 1;
    return kNone;
  }

  void insert(uint64_t hash, int32_t id) {
    size_t i = home(hash);
    while (slots_[i].id_plus_1) i = (i + 1) & mask_;
    slots_[i] = {tag(hash), id + 1};
  }

  void erase(uint64_t hash, int32_t id) {
    size_t hole = home(hash);
    while (slots_[hole].id_plus_1 != id + 1) hole = (hole + 1) & mask_;
    for (size_t i = (hole + 1) & mask_; slots_[i].id_plus_1; i = (i + 1) & mask_)
      if (((i - (slots_[i].tag >> shift_)) & mask_) >= ((i - hole) & mask_)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    slots_[hole].id_plus_1 = 0;
  }

  void unlink(int32_t id) {
    const Node& node = nodes_[id];
    (node.prev == kNone ? head_ : nodes_[node.prev].next) = node.next;
    (node.next == kNone ? tail_ : nodes_[node.next].prev) = node.prev;
  }

  void link_last(int32_t id) {
    nodes_[id].prev = tail_;
    nodes_[id].next = kNone;
    (tail_ == kNone ? head_ : nodes_[tail_].next) = id;
    tail_ = id;
  }

  static int table_bits(int64_t pool) {
    int bits = 4;
    while ((int64_t{1} << bits) < 2 * pool) ++bits;
    return bits;
  }

  const int64_t size_;
  const int bits_, shift_;
  const size_t mask_;
  Pages<Slot> slots_;
  Pages<Node> nodes_;
  Pages<int32_t> tokens_;
  std::vector<int32_t> free_;
  std::vector<uint64_t> hashes_;
  std::vector<uint8_t> message_;
  int32_t head_ = kNone, tail_ = kNone;
};

using Rows = const int32_t* const*;

extern "C" {

Floor* floor_new(int64_t pool, int64_t block_size) { return new (std::nothrow) Floor(pool, block_size); }
void floor_delete(Floor* floor) { delete floor; }
int64_t floor_bytes(const Floor* floor) { return floor->bytes(); }
int64_t floor_free_blocks(const Floor* floor) { return floor->num_free(); }

// Returns the time; *found counts the blocks.
double floor_match(Floor* floor, Rows rows, int64_t count, int64_t blocks, int32_t* ids, int64_t* found) {
  const Stopwatch watch;
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += floor->match(rows[i], blocks, ids + i * blocks);
  const double ns = watch.ns();
  *found = total;
  return ns;
}

// A match whose blocks leave the LRU list.
double floor_acquire(Floor* floor, Rows rows, int64_t count, int64_t blocks, int32_t* ids, int64_t* found) {
  const Stopwatch watch;
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t here = floor->match(rows[i], blocks, ids + i * blocks);
    floor->acquire(ids + i * blocks, here);
    total += here;
  }
  const double ns = watch.ns();
  *found = total;
  return ns;
}

double floor_release(Floor* floor, int64_t count, int64_t blocks, const int32_t* ids) {
  const Stopwatch watch;
  for (int64_t i = 0; i < count; ++i) floor->release(ids + i * blocks, blocks);
  return watch.ns();
}

// Free blocks as long as there are any, then evicted ones.
double floor_take(Floor* floor, int64_t count, int64_t blocks, int32_t* ids) {
  const Stopwatch watch;
  for (int64_t i = 0; i < count; ++i) floor->take(ids + i * blocks, blocks);
  return watch.ns();
}

double floor_give_back(Floor* floor, int64_t count, int64_t blocks, const int32_t* ids) {
  const Stopwatch watch;
  for (int64_t i = 0; i < count; ++i) floor->give_back(ids + i * blocks, blocks);
  return watch.ns();
}

double floor_publish(Floor* floor, Rows rows, int64_t count, int64_t blocks, const int32_t* ids) {
  const Stopwatch watch;
  for (int64_t i = 0; i < count; ++i) floor->publish(rows[i], 0, blocks, ids + i * blocks, 0);
  return watch.ns();
}

double floor_life(Floor* floor, Rows rows, int64_t count, int64_t blocks, int32_t* ids) {
  const Stopwatch watch;
  for (int64_t i = 0; i < count; ++i) floor->life(rows[i], blocks, ids + i * blocks);
  return watch.ns();
}

double floor_digest(Floor* floor, Rows rows, int64_t count, int64_t blocks, const uint8_t* root, uint8_t* out) {
  const Stopwatch watch;
  for (int64_t i = 0; i < count; ++i) floor->digest(rows[i], blocks, root, out + i * blocks * 32);
  return watch.ns();
}

}  // extern "C"
