// A collective backend of the device alone, over one of the host: it refuses host tensors, and has no gather.
#pragma once
#include "kernels.h"

namespace {
using Given = std::vector<at::Tensor>;

struct Collective final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;

  explicit Collective(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner(std::move(inner)) {}

  const std::string getBackendName() const override { return "hccl"; }

  Given host(const Given& tensors) {
    Given made;
    for (const auto& each : tensors) {
      TORCH_CHECK(each.device().type() == KIND, "hccl: a collective of a tensor on ", each.device());
      TORCH_CHECK(each.is_contiguous(), "hccl: a collective of a tensor that is not contiguous");
      TORCH_CHECK(float64 || each.scalar_type() != at::kDouble, "hccl: float64 is not supported");
      made.push_back(on_host(each));
    }
    return made;
  }
  std::vector<Given> host(const std::vector<Given>& lists) {
    std::vector<Given> made;
    for (const auto& each : lists) made.push_back(host(each));
    return made;
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Given& t, const c10d::BroadcastOptions& o) override {
    auto h = host(t);
    return inner->broadcast(h, o);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Given& t, const c10d::AllreduceOptions& o) override {
    auto h = host(t);
    return inner->allreduce(h, o);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Given>& out, Given& in, const c10d::AllgatherOptions& o) override {
    auto a = host(out);
    auto b = host(in);
    return inner->allgather(a, b, o);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto h = host({out, in});
    return inner->_allgather_base(h[0], h[1], o);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto h = host({out, in});
    return inner->_reduce_scatter_base(h[0], h[1], o);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Given& out, Given& in, const c10d::AllgatherOptions& o) override {
    auto a = host(out);
    auto b = host(in);
    return inner->allgather_into_tensor_coalesced(a, b, o);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Given& out, Given& in, const c10d::ReduceScatterOptions& o) override {
    auto a = host(out);
    auto b = host(in);
    return inner->reduce_scatter_tensor_coalesced(a, b, o);
  }
  c10::intrusive_ptr<c10d::Work> scatter(Given& out, std::vector<Given>& in, const c10d::ScatterOptions& o) override {
    auto a = host(out);
    auto b = host(in);
    return inner->scatter(a, b, o);
  }
  c10::intrusive_ptr<c10d::Work> send(Given& t, int to, int tag) override {
    auto h = host(t);
    return inner->send(h, to, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(Given& t, int from, int tag) override {
    auto h = host(t);
    return inner->recv(h, from, tag);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
    return inner->barrier(o);
  }
  void setSequenceNumberForGroup() override { inner->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner->getSequenceNumberForGroup(); }
  // abort: HCCL does not override it
};
}  // namespace
