// EvictionOrder: which evictable block of one level goes next. O(1) a block, whatever the policy.
//
// Layout: a few doubly linked lists threaded through the nodes (Node::link); head = goes first.
//
//     priority 0    kProbation  and  kMain         priority p > 0    kPriority + p - 1
//
// Leaf-first LRU ("lru", everything of priority 0 is in kMain): blocks leave in the order in which they became unheld;
// of the blocks that one release left unheld, the deepest first. A hold is on a whole prefix, so nothing is ever let go
// after its own parent was: in list order a child comes before its parent, and the head has no child at this level.
// Nobody has to look for leaves.
//
// Scan-resistant ("2q", after Johnson and Shasha's 2Q; S3-FIFO is its sibling): a block that no match has found since
// it was published waits in kProbation, the others in kMain. The victim comes from kProbation while that holds more
// than half of the pool, so that prompts seen once push each other out and not the prefixes in use. (Half, because it
// gained on Mooncake's two traces at nearly every size, up to 50 % more hits than LRU in small pools; a tenth gained a
// little more there and lost 14 % in middling pools, where what is seen once so far often comes again.) A block that is
// published again soon after it fell out of kProbation (the index keeps a ghost list of hashes) starts in kMain. If
// something below is hot, so is everything above (a match finds whole prefixes), hence a child in kMain has its parent
// in kMain; a kMain head can only have children in kProbation, and then that list gives the victim.
//
// A node in a copy keeps its place and is passed over; its size does not count it.
//
// Priorities go above both: the victim comes from the lowest non-empty priority. Priorities and their expiry are raised
// along whole prefixes, so a child never outranks its parent and every list head is a leaf among the lists that may
// give the victim.
#pragma once

#include <algorithm>
#include <string>

#include "node.h"

namespace fastkv::core {

enum class Policy { kLru, kTwoQueue };

inline Policy policy_of(const std::string& name) {
  if (name == "lru") return Policy::kLru;
  if (name == "2q") return Policy::kTwoQueue;
  throw RequestFault("unknown eviction policy '" + name + "'; allowed: lru, 2q");
}

class EvictionOrder {
 public:
  static constexpr int kProbation = 0, kMain = 1, kPriority = 2, kMaxPriority = 7, kLists = kPriority + kMaxPriority;

  EvictionOrder(FlatArray<Node>& nodes, Level level, Policy policy) : nodes_(nodes), level_(level), policy_(policy) {}

  int64_t size() const { return size_; }
  void set_probation_target(int64_t blocks) { probation_target_ = blocks; }

  // The node became evictable here; of one release, deeper nodes come first.
  void push(NodeId id) {
    Node& node = nodes_[id];
    const int index = list_of(node);
    List& list = lists_[index];
    node.link[level_] = {list.tail, kNone};
    node.list[level_] = static_cast<uint8_t>(index);
    (list.tail == kNone ? list.head : nodes_[list.tail].link[level_].next) = id;
    list.tail = id;
    count(list, node.has(kInCopy) ? 0 : 1);
    passed_over_ += node.has(kInCopy);
  }

  // As push, but right before `before`, which is in this order; used when a copy lands after its parent's did.
  void push_before(NodeId id, NodeId before) {
    Node& node = nodes_[id];
    const uint8_t index = nodes_[before].list[level_];
    const NodeId prev = nodes_[before].link[level_].prev;
    node.link[level_] = {prev, before};
    node.list[level_] = index;
    (prev == kNone ? lists_[index].head : nodes_[prev].link[level_].next) = id;
    nodes_[before].link[level_].prev = id;
    count(lists_[index], node.has(kInCopy) ? 0 : 1);
    passed_over_ += node.has(kInCopy);
  }

  // A node of this order gets into a copy, or out of it. Call before kInCopy is set, and after it was taken back.
  void pass_over(NodeId id) {
    count(lists_[nodes_[id].list[level_]], -1);
    ++passed_over_;
  }
  void count_again(NodeId id) {
    count(lists_[nodes_[id].list[level_]], 1);
    --passed_over_;
  }

  bool contains(NodeId id) const { return nodes_[id].list[level_] != kNoList; }

  void remove(NodeId id) {
    Node& node = nodes_[id];
    const Link link = node.link[level_];
    List& list = lists_[node.list[level_]];
    (link.prev == kNone ? list.head : nodes_[link.prev].link[level_].next) = link.next;
    (link.next == kNone ? list.tail : nodes_[link.next].link[level_].prev) = link.prev;
    node.list[level_] = kNoList;
    count(list, node.has(kInCopy) ? 0 : -1);
    passed_over_ -= node.has(kInCopy);
  }

  // Many pushes or removals in a row, of nodes that are in no copy, with the counters in registers and neighbours in
  // the list unlinked together: a counter in memory costs more than everything else here, because each update waits for
  // the one before.
  class Pusher {
   public:
    explicit Pusher(EvictionOrder& order) : order_(order), nodes_(order.nodes_.data()), level_(order.level_) {}
    ~Pusher() { flush(); }

    void push(NodeId id, Node& node) {
      const int index = order_.list_of(node);
      if (index != index_) open(index);
      node.link[level_] = {tail_, kNone};
      node.list[level_] = static_cast<uint8_t>(index);
      (tail_ == kNone ? order_.lists_[index].head : nodes_[tail_].link[level_].next) = id;
      tail_ = id;
      ++added_;
    }

    // Call it before anybody else uses the order.
    void flush() {
      if (index_ < 0) return;
      order_.lists_[index_].tail = tail_;
      order_.count(order_.lists_[index_], added_);
      index_ = -1;
    }

   private:
    void open(int index) {
      flush();
      index_ = index;
      tail_ = order_.lists_[index].tail;
      added_ = 0;
    }

    EvictionOrder& order_;
    Node* const nodes_;
    const Level level_;
    int index_ = -1;
    NodeId tail_ = kNone;
    int64_t added_ = 0;
  };

  class Remover {
   public:
    explicit Remover(EvictionOrder& order) : order_(order) {}
    ~Remover() { flush(); }

    void remove(NodeId id, Node& node) {
      uint8_t& index = node.list[order_.level_];
      if (count_ == 0 || next_ != id || index != index_) {
        flush();
        index_ = index;
        before_ = node.link[order_.level_].prev;
      }
      next_ = node.link[order_.level_].next;
      index = kNoList;
      ++count_;
    }

    void flush() {
      if (!count_) return;
      List& list = order_.lists_[index_];
      (before_ == kNone ? list.head : order_.nodes_[before_].link[order_.level_].next) = next_;
      (next_ == kNone ? list.tail : order_.nodes_[next_].link[order_.level_].prev) = before_;
      order_.count(list, -count_);
      count_ = 0;
    }

   private:
    EvictionOrder& order_;
    int index_ = 0;
    NodeId before_ = kNone, next_ = kNone;
    int64_t count_ = 0;
  };

  // Take out `length` nodes in a row, from first to last, none of them in a copy; their list[] is the caller's
  // business.
  void cut(int list_index, NodeId first, NodeId last, int64_t length) {
    List& list = lists_[list_index];
    const NodeId before = nodes_[first].link[level_].prev, after = nodes_[last].link[level_].next;
    (before == kNone ? list.head : nodes_[before].link[level_].next) = after;
    (after == kNone ? list.tail : nodes_[after].link[level_].prev) = before;
    count(list, -length);
  }

  // The next victims: from head on, count nodes along link.next go in this order, as long as the order is not changed.
  struct Victims {
    NodeId head;
    int64_t count;
  };
  Victims victims() const {
    const List& probation = lists_[kProbation];
    const List& main = lists_[kMain];
    if (probation.size > probation_target_) return run(probation, probation.size - probation_target_);
    if (probation.size && (!main.size || nodes_[first(main)].device_children)) return run(probation, 1);
    if (probation.size) return run(main, 1);  // one at a time: the next of kMain may have children
    for (int list = kMain; list < kLists; ++list)
      if (lists_[list].size) return run(lists_[list], lists_[list].size);
    return {kNone, 0};
  }

  NodeId head(int list) const { return lists_[list].head; }
  NodeId after(NodeId id) const { return nodes_[id].link[level_].next; }

  void clear() {
    for (List& list : lists_) list = List{};
    size_ = passed_over_ = 0;
  }

 private:
  static constexpr int64_t kLongestRun = 64;  // looked ahead for, while anything is in a copy

  struct List {
    NodeId head = kNone, tail = kNone;
    int64_t size = 0;  // without nodes in a copy
  };

  void count(List& list, int64_t change) {
    list.size += change;
    size_ += change;
  }

  // The first node of a list with size > 0 that is not in a copy.
  NodeId first(const List& list) const {
    NodeId id = list.head;
    while (passed_over_ && nodes_[id].has(kInCopy)) id = nodes_[id].link[level_].next;
    return id;
  }

  // Up to `most` nodes in a row, none of them in a copy; at least one, as list.size > 0.
  Victims run(const List& list, int64_t most) const {
    if (!passed_over_) return {list.head, most};
    const NodeId head = first(list);
    int64_t length = 1;
    for (NodeId id = nodes_[head].link[level_].next; length < std::min(most, kLongestRun); ++length) {
      if (id == kNone || nodes_[id].has(kInCopy)) break;
      id = nodes_[id].link[level_].next;
    }
    return {head, length};
  }

  int list_of(const Node& node) const {
    if (node.priority) return kPriority + node.priority - 1;
    return policy_ == Policy::kTwoQueue && level_ == kDevice && !node.has(kHot) ? kProbation : kMain;
  }

  FlatArray<Node>& nodes_;
  const Level level_;
  const Policy policy_;
  List lists_[kLists];
  int64_t size_ = 0;
  int64_t passed_over_ = 0;  // nodes of all lists that are in a copy
  int64_t probation_target_ = 0;
};

}  // namespace fastkv::core
