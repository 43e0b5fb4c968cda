// Operators of the device: allocation, copies, views, and the CPU's kernels behind the checks of an accelerator.
#pragma once
#include "memory.h"

namespace {
// The same bytes as a host tensor; the device's storage lives as long as it does.
at::Tensor on_host(const at::Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  auto forget = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::DataPtr data(tensor.storage().mutable_data(), kept, forget, c10::Device(c10::kCPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(KIND, current)));
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(KIND, current)));
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& host) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
      base.key_set(), host.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return made;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  for (const auto& each : {from, to})
    TORCH_CHECK(each.numel() == 0 || each.storage().nbytes() > 0, "copy_: reads or writes memory that was freed");
  const auto host = from.device().is_cpu() ? from : on_host(from);
  if (to.device().is_cpu()) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (non_blocking && is_pinned(to.data_ptr())) {
      arriving.push_back([to, now = host.clone()]() { to.copy_(now); });  // what the device held when it was asked
    } else {
      arrive();
      to.copy_(host);
    }
  } else {
    on_host(to).copy_(host);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  arrive();
  return on_host(self).item();
}

const at::Tensor& resize_own(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t needed = self.dtype().itemsize();
  for (auto each : size) needed *= each;
  needed += self.storage_offset() * self.dtype().itemsize();
  if (int64_t(self.storage().nbytes()) < needed) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() == nullptr) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const int64_t items = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {items}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// no kernel ran: it would have been a device's own
void record_stream(at::Tensor&, at::Stream) {}

// What every kernel does: the CPU's own, on the same memory, after what a device would have refused.
void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  const bool views = alias != nullptr && !alias->isWrite();
  const bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";  // these take the host's
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // device, host
  c10::Device device(KIND, current);
  auto take = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().is_cpu()) {
      TORCH_CHECK(tensor.dim() == 0 || indexes, "Expected all tensors to be on the same device, but ", name,
          " was given one on cpu of shape ", tensor.sizes(), " besides those on npu");
      return tensor;
    }
    TORCH_CHECK(tensor.device().type() == KIND, name, ": a tensor on ", tensor.device());
    TORCH_CHECK(float64 || tensor.scalar_type() != at::kDouble, name, ": float64 is not supported on npu");
    TORCH_CHECK(views || tensor.numel() == 0 || tensor.storage().nbytes() > 0, name, ": reads or writes memory that was freed");
    TORCH_CHECK(pairs.empty() || tensor.device() == pairs[0].first.device(), "Expected all tensors to be on the same device, but ",
        name, " was given some on ", tensor.device(), " and on ", pairs[0].first.device());
    device = tensor.device();
    for (auto& [own, host] : pairs)
      if (own.is_same(tensor)) return host;
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  };
  for (size_t at = first; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& each : value.toTensorVector()) list.push_back(take(each));
      value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector())
        list.push_back(each.has_value() ? std::optional<at::Tensor>(take(*each)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().type() == KIND) value = c10::Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [own, host] : pairs) {  // an output that grew
    if (own.sizes() == host.sizes() && own.storage_offset() == host.storage_offset() && own.strides() == host.strides()) continue;
    if (host.storage().nbytes() > own.storage().nbytes() || host.storage().data() != own.storage().data()) {
      resize_own(own, host.sizes(), std::nullopt);
      on_host(own).copy_(host);
    } else {
      own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
  const c10::DeviceGuard guard(device);
  auto give = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    TORCH_CHECK(float64 || tensor.scalar_type() != at::kDouble, name, ": float64 is not supported on npu");
    for (auto& [own, host] : pairs)
      if (host.is_same(tensor)) return own;
    for (auto& [own, host] : pairs)
      if (tensor.has_storage() && tensor.storage().is_alias_of(host.storage())) return view_of(own, tensor);
    auto made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, device, {});
    on_host(made).copy_(tensor);
    return made;
  };
  const size_t results = schema.returns().size();
  for (size_t at = stack->size() - results; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isTensor()) {
      value = give(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& each : value.toTensorVector()) list.push_back(give(each));
      value = c10::List<at::Tensor>(list);
    }
  }
}

at::Tensor on_device(const at::Tensor& host, const at::Tensor& beside) {
  auto made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, beside.device(), {});
  on_host(made).copy_(host);
  return made;
}

// Convolutions go to a device by these names.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  const auto b = bias && bias->defined() ? std::optional<at::Tensor>(on_host(*bias)) : std::nullopt;
  return on_device(at::convolution(on_host(input), on_host(weight), b, stride, padding, dilation, transposed, output_padding, groups), input);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& input,
    const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const int64_t channels = gradient.size(1);
  auto [a, b, c] = at::convolution_backward(on_host(gradient), on_host(input), on_host(weight), at::IntArrayRef(channels), stride,
      padding, dilation, transposed, output_padding, groups, mask);
  auto give = [&](const at::Tensor& each) { return each.defined() ? on_device(each, input) : each; };
  return {give(a), give(b), give(c)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_own);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
}  // namespace
