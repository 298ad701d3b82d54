// A CUDA device for torch's autograd engine on a build without CUDA: it has one stream, which does
// nothing, so that a backward pass through fake tensors on "cuda" can run. Which kernels autocast
// and the dispatcher choose for CUDA is torch's own. Loaded before torch, its names come first.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
namespace at::accelerator {
std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
}
namespace at::detail {
struct Hooks final : CUDAHooksInterface {
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
const CUDAHooksInterface& getCUDAHooks() { static Hooks hooks; return hooks; }
}
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  static Stream stream() { return Stream(Stream::DEFAULT, only()); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
