// Memory, streams and hooks of the device. Streams do everything at once; memory is malloc's, filled with garbage.
#pragma once
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <mutex>
#include <set>

namespace {
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int MOST = 8;
std::recursive_mutex lock;
int devices = 1;
thread_local c10::DeviceIndex current = 0;
int64_t used[MOST], peak[MOST];
int64_t room = int64_t(1) << 40;
bool float64 = true;
std::map<void*, std::pair<size_t, int>> blocks;
std::map<void*, size_t> pinned;
std::vector<std::function<void()>> arriving;  // copies to pinned memory that nobody waited for yet

void arrive() {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto now = std::move(arriving);
  arriving.clear();
  for (auto& each : now) each();
}

void freed(void* data) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (auto found = blocks.find(data); found != blocks.end()) {
    used[found->second.second] -= found->second.first;
    blocks.erase(found);
  }
  std::free(data);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> held(lock);
    const c10::Device device(KIND, current);
    if (bytes == 0) return {nullptr, nullptr, &freed, device};
    TORCH_CHECK_WITH(OutOfMemoryError, used[current] + int64_t(bytes) <= room, "npu:", int(current),
        " out of memory: tried to allocate ", bytes, " bytes, ", used[current], " of ", room, " in use");
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(data, 0xCD, bytes);  // nobody may count on zeros
    blocks[data] = {bytes, current};
    used[current] += bytes;
    peak[current] = std::max(peak[current], used[current]);
    return {data, data, &freed, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(KIND, &memory);

void unpinned(void* data) {
  std::lock_guard<std::recursive_mutex> held(lock);
  pinned.erase(data);
  std::free(data);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> held(lock);
    void* data = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
    pinned[data] = bytes + 1;
    return {data, data, &unpinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_memory;

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto after = pinned.upper_bound(const_cast<void*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < static_cast<const char*>(after->first) + after->second;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < devices, "npu:", int(device.index()), " is not one of ", devices, " device(s)");
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { arrive(); }
  void synchronizeEvent(void*) const override { arrive(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { arrive(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::kCPU);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const auto before = std::exchange(current, storage.device().index());
    auto data = memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
    current = before;
  }
};
}  // namespace
