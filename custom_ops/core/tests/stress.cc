// Stress target of the scheduler core, for the sanitizers: random calls from several threads on one manager.
//
//     stress [threads] [calls per thread] [seed] [policy]
//
// Requests draw their tokens from a few prefixes, so that they share, duplicate and evict each other's blocks. Every
// block of a request's own is marked with an owner while the request has it, so that handing a block out twice is found
// at once; copies between levels begin at any time and end in any order, some of them failed. check() recomputes every
// invariant now and then, and at the end nothing may be held. A failure prints and exits with 1.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../manager.h"

namespace {

using namespace fastkv::core;

constexpr int32_t kBlocks = 96;
constexpr int32_t kHostBlocks = 40;
constexpr int64_t kBlockSize = 4;
constexpr double kForever = std::numeric_limits<double>::infinity();

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "stress: %s\n", what.c_str());
  std::exit(1);
}

// Blocks that a request has for itself; nobody else may have them.
class Owners {
 public:
  void take(const Row<BlockId>& ids) {
    for (const BlockId id : ids)
      if (owned_[id].exchange(true)) fail("block " + std::to_string(id) + " was handed out twice");
  }
  void give(std::vector<BlockId>& ids) {
    for (const BlockId id : ids) owned_[id] = false;
    ids.clear();
  }

 private:
  std::atomic<bool> owned_[2 * kBlocks] = {};
};

class Client {
 public:
  Client(Manager& manager, Owners& owners, int number, uint32_t seed)
      : manager_(manager), owners_(owners), name_("client-" + std::to_string(number)), random_(seed) {}

  void run(int64_t calls) {
    for (int64_t i = 0; i < calls; ++i) {
      step();
      if (i % 97 == 0) manager_.check();
      if (i % 29 == 0) (void)manager_.take_events(i % 3 == 0);
    }
    leave();
    while (!copies_.empty()) end_copy();
  }

 private:
  int draw(int below) { return static_cast<int>(random_() % static_cast<uint32_t>(below)); }

  bool allocate(int64_t count, Row<BlockId>& ids) {
    int64_t left = 0;
    return manager_.try_allocate(
        name_, count, INT64_MAX, &left,
        [&](const BlockId* table, int64_t first, int64_t added) { ids.append(table + first, added); });
  }

  void step() {
    if (!open_) return enter();
    Row<BlockId> ids;
    switch (draw(13)) {
      case 0:
      case 1:
        if (allocate(draw(5), ids)) keep(ids);
        break;
      case 2: {
        const int64_t needed = manager_.blocks_needed(name_, manager_.num_tokens(name_));
        if (!allocate(needed, ids)) return leave();
        keep(ids);
        owners_.give(own_);  // publish may free blocks or share them
        if (draw(4) == 0) load();
        publish();
        break;
      }
      case 3: {
        const int32_t token = draw(2);
        manager_.append(name_, &token, 1);
        break;
      }
      case 4:
        if (manager_.try_reserve(name_, draw(9), ids)) {
          keep(ids);
          owners_.give(own_);
          const int32_t accepted[2] = {1, 0};
          manager_.confirm(name_, accepted, draw(3));
        }
        break;
      case 5:
        owners_.give(own_);
        manager_.preempt(name_);
        match();
        break;
      case 6:
        fork();
        break;
      case 7:
        pin();
        break;
      case 8:
        manager_.with_table(name_, [](const BlockId*, int64_t) { return 0; });
        manager_.compute_digests(name_, -1);
        break;
      case 9:
        begin_copy();
        break;
      case 10:
      case 11:
        end_copy();
        break;
      default:
        leave();
    }
  }

  void publish() {
    try {
      manager_.publish(name_, manager_.num_tokens(name_));
    } catch (const RequestFault&) {  // a load is writing its blocks: later
    }
  }

  void begin_copy() {
    BegunTransfer begun;
    const int kind = draw(3);
    if (kind == 0) begun = manager_.begin_offload(name_, draw(3));
    if (kind == 1) begun = manager_.begin_write_back(1 + draw(8));
    if (kind == 2) begun = manager_.begin_fetch(name_, manager_.cached_blocks(name_), 1 + draw(8));
    if (begun.id) copies_.push_back(begun.id);
  }

  // What match found on the host, into the request's own blocks.
  void load() {
    try {
      const BegunTransfer begun = manager_.begin_load(name_);
      if (begun.id) copies_.push_back(begun.id);
    } catch (const RequestFault&) {  // too few blocks, or a load is under way
    }
  }

  void end_copy() {
    if (copies_.empty()) return;
    std::swap(copies_[static_cast<size_t>(draw(static_cast<int>(copies_.size())))], copies_.back());
    const int64_t id = copies_.back();
    copies_.pop_back();
    (void)manager_.transfer_digests(id);
    const BegunTransfer store = manager_.end_transfer(id, draw(3) ? 1000 : draw(3), draw(2) == 0);
    if (store.id) copies_.push_back(store.id);
  }

  void enter() {
    std::vector<int32_t> tokens(static_cast<size_t>(1 + draw(60)));
    const int prefix = draw(3), same = draw(40);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int>(i) < same ? prefix : draw(2);
    std::vector<Extra> extras;
    if (draw(5) == 0) extras.push_back({0, "salt"});
    if (draw(5) == 0) extras.push_back({2, "image"});
    manager_.open(name_, tokens.data(), static_cast<int64_t>(tokens.size()), extras, {}, draw(4) ? 0 : 1 + draw(7),
                  draw(2) ? kForever : 1.0 + draw(3));
    open_ = true;
    match();
  }

  void match() {
    Match found;
    manager_.match(name_, found);
  }

  void keep(const Row<BlockId>& ids) {
    owners_.take(ids);
    own_.insert(own_.end(), ids.begin(), ids.end());
  }

  void fork() {
    const std::string child = name_ + "-fork";
    try {
      owners_.give(own_);
      manager_.fork(name_, child);
      manager_.release(child);
    } catch (const OutOfBlocksFault&) {  // no block for the partial one
    }
  }

  void pin() {
    try {
      manager_.unpin(manager_.pin(name_, -1));
    } catch (const RequestFault&) {  // nothing published, or not findable, or past the limit, or reset meanwhile
    }
  }

  void leave() {
    if (!open_) return;
    owners_.give(own_);
    manager_.release(name_);
    open_ = false;
  }

  Manager& manager_;
  Owners& owners_;
  const std::string name_;
  std::mt19937 random_;
  std::vector<BlockId> own_;
  std::vector<int64_t> copies_;
  bool open_ = false;
};

// What an operator does meanwhile: time passes, weights change, the pool is resized.
void operate(Manager& manager, const std::atomic<bool>& stop) {
  for (int round = 1; !stop; ++round) {
    manager.tick(round * 0.5);
    if (round % 16 == 0) manager.invalidate();
    if (round % 8 == 0) manager.resize(round % 16 ? kBlocks / 2 : kBlocks, true);
    (void)manager.counts(kDevice);
    (void)manager.bookkeeping_bytes();
    std::this_thread::yield();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 4;
  const int64_t calls = argc > 2 ? std::atoll(argv[2]) : 20000;
  const auto seed = static_cast<uint32_t>(argc > 3 ? std::atoi(argv[3]) : 1);
  ManagerOptions options;
  options.num_device_blocks = kBlocks;
  options.num_host_blocks = kHostBlocks;
  options.block_size = kBlockSize;
  options.policy = policy_of(argc > 4 ? argv[4] : "lru");
  options.max_pinned_blocks = kBlocks / 4;
  options.seed = seed;
  options.hash_mask = seed % 2 ? ~uint64_t{0} : uint64_t{3} << 62;  // every other run: four hashes in all
  options.log_events = true;
  Manager manager(options);
  Owners owners;
  std::atomic<bool> stop{false};
  std::thread operating([&] { operate(manager, stop); });
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i)
    workers.emplace_back([&, i] {
      try {
        Client(manager, owners, i, seed * 1000 + static_cast<uint32_t>(i)).run(calls);
      } catch (const std::exception& error) {
        fail(error.what());
      }
    });
  for (std::thread& worker : workers) worker.join();
  stop = true;
  operating.join();
  manager.check();
  const LevelCounts counts = manager.counts(kDevice);
  const int64_t held = counts.held + manager.counts(kHost).held + manager.num_transfers();
  if (held != 0 || manager.num_open() != 0) fail(std::to_string(held) + " blocks or copies are still held");
  std::printf("stress: %d threads x %lld calls, policy %s: no block handed out twice, nothing held\n", threads,
              static_cast<long long>(calls), argc > 4 ? argv[4] : "lru");
  return 0;
}
