// A device whose memory is not the host's, for PyTorch's PrivateUse1 hook. Kernels are the CPU's, on the device's
// memory; what a GPU refuses is refused, and what makes a GPU wait is reported to a callback.
//
// Where it behaves like a GPU:
// - Tensors of the host beside tensors of the device are an error, apart from scalars.
// - New memory holds NaN, not zeros.
// - A copy to pinned memory that does not block arrives at the next synchronization; until then there is NaN.
// - There is a limit to its memory, and a peak. What is freed stays reserved until the cache is emptied.
// - Host memory that is pinned takes the next power of two.
// - The backward pass runs in a thread of its own.
//
// Hollow, it has shapes only: its memory is counted but never written, operations compute the shapes of their results,
// numbers read from it are one, and other ranks' processes need not exist. So models of any size run in seconds.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <bit>
#include <map>
#include <mutex>
#include <unordered_set>

namespace {
bool hollow = false;
}

int64_t attention_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor&, const std::optional<at::Tensor>& mask,
    double dropout, bool, std::optional<double>, bool) {
  // the CPU's kernel takes no groups of heads, a GPU's does
  bool is_kernel = dropout == 0.0 && query.dim() == 4 && (hollow || query.size(1) == key.size(1)) &&
      !(mask && mask->requires_grad());
  return static_cast<int64_t>(is_kernel ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(TYPE, 0);
const c10::Stream STREAM(c10::Stream::DEFAULT, DEVICE);
std::mutex mutex;

// Reports.

PyObject* callback = nullptr;

/// Tells the test's callback what makes the host wait for the device, or crosses between their memories.
void report(const char* kind, const std::string& operation, int64_t bytes) {
  if (callback == nullptr || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (callback == nullptr) return;
  py::reinterpret_borrow<py::function>(callback)(kind, operation, bytes);
}

// Memory.

constexpr size_t HEADER = 64;  // holds a block's size, and keeps what follows aligned

/// Reserves addresses of the host, which take no memory until they are written.
char* reserve(size_t bytes) {
  auto* block = mmap(
      nullptr, bytes + HEADER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(block != MAP_FAILED, "the host has no ", bytes, " bytes of addresses");
  *static_cast<size_t*>(block) = bytes;
  return static_cast<char*>(block);
}

size_t size_of(void* block) { return *static_cast<size_t*>(block); }

struct Allocator final : c10::DeviceAllocator {
  size_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, size = size_t(80) << 30;
  size_t others = 0;  // held by other processes

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, DEVICE};
    {
      std::lock_guard<std::mutex> lock(mutex);
      TORCH_CHECK_WITH(
          OutOfMemoryError, allocated + bytes + others <= size, "simgpu out of memory: tried to allocate ", bytes,
          " bytes; ", allocated + others, " of ", size, " are in use");
      allocated += bytes;
      peak = std::max(peak, allocated);
      reserved = std::max(reserved, allocated);
      reserved_peak = std::max(reserved_peak, reserved);
    }
    auto* block = reserve(bytes);
    if (!hollow) std::memset(block + HEADER, 0xFF, bytes);
    return {block + HEADER, block, &release, DEVICE};
  }
  static void release(void* block);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { reserved = allocated; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = allocated;
      (*bytes)[0].peak = peak;
    }
    stats.reserved_bytes[0].current = reserved;
    stats.reserved_bytes[0].peak = reserved_peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = allocated, reserved_peak = reserved; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    auto in_use = std::min(reserved + others, size);
    return {size - in_use, size};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator)

void Allocator::release(void* block) {
  if (block == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    allocator.allocated -= size_of(block);
  }
  munmap(block, size_of(block) + HEADER);
}

struct PinnedAllocator final : c10::Allocator {
  std::map<const char*, size_t> blocks;
  size_t allocated = 0;

  c10::DataPtr allocate(size_t bytes) override {
    bytes = bytes ? std::bit_ceil(bytes) : 0;
    auto* block = reserve(bytes);
    std::lock_guard<std::mutex> lock(mutex);
    blocks[block + HEADER] = bytes;
    allocated += bytes;
    return {block + HEADER, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* block);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(data));
    if (after == blocks.begin()) return false;
    auto block = std::prev(after);
    return static_cast<const char*>(data) < block->first + std::max<size_t>(block->second, 1);
  }
};

PinnedAllocator pinned;

void PinnedAllocator::release(void* block) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.blocks.erase(static_cast<char*>(block) + HEADER);
    pinned.allocated -= size_of(block);
  }
  munmap(block, size_of(block) + HEADER);
}

/// Returns a CPU tensor over the memory of a device's tensor.
at::Tensor host_view(const at::Tensor& tensor) {
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(
      tensor.storage().mutable_data(), owner, [](void* held) { delete static_cast<c10::Storage*>(held); },
      c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

// Copies that have not arrived.

struct Pending {
  at::Tensor to, from;
};
std::vector<Pending> pending;

void arrive() {
  std::vector<Pending> copies;
  {
    std::lock_guard<std::mutex> lock(mutex);
    copies.swap(pending);
  }
  for (auto& copy : copies) copy.to.copy_(copy.from);
}

void synchronize(const char* operation) {
  arrive();
  report("synchronize", operation, 0);
}

// The device.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return STREAM; }
  c10::Stream getDefaultStream(c10::Device) const override { return STREAM; }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return STREAM; }
  c10::Stream getNewStream(c10::Device, int) const override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const override { return STREAM; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = &mutex;  // not null: recorded
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override { synchronize("event"); }
  void synchronizeStream(const c10::Stream&) const override { synchronize("stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize("device"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    if (!hollow && bytes && storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Operations.

at::Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

constexpr size_t SMALL = size_t(1) << 20;  // larger memory of the host is not written either

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool waits = !(non_blocking && pinned.holds((to.device().type() == TYPE ? from : to).storage().data()));
  if (hollow) {
    if (to.device().type() == TYPE) {
      if (from.device().type() != TYPE) report(waits ? "to device" : "to device, later", "copy", to.nbytes());
    } else {
      report(waits ? "to host" : "to host, later", "copy", to.nbytes());
      if (to.nbytes() < SMALL) to.zero_();
    }
    return to;
  }
  if (from.device().type() == TYPE && to.device().type() == TYPE) {
    host_view(to).copy_(host_view(from));
  } else if (to.device().type() == TYPE) {
    report(waits ? "to device" : "to device, later", "copy", to.nbytes());
    host_view(to).copy_(from);
  } else if (!waits) {
    report("to host, later", "copy", to.nbytes());
    auto bytes = host_view(from).clone();
    if (to.is_contiguous()) std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
    std::lock_guard<std::mutex> lock(mutex);
    pending.push_back({to, bytes});
  } else {
    arrive();
    report("to host", "copy", to.nbytes());
    to.copy_(host_view(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize("item");
  if (hollow) return at::isFloatingType(self.scalar_type()) ? at::Scalar(1.0) : at::Scalar(int64_t(1));
  return at::native::_local_scalar_dense_cpu(host_view(self));
}

// Attention that keeps no matrix of all pairs, as a GPU's does.

at::Tensor on_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto placed = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(DEVICE));
  if (!hollow) host_view(placed).copy_(tensor);
  return placed;
}

using Attended = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

Attended attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, bool, std::optional<double> scale) {
  at::Tensor out, logsumexp;
  if (hollow) {
    auto sizes = query.sizes().vec();
    sizes.back() = value.size(-1);
    // laid out as the kernels of GPUs do: tokens before heads
    out = at::empty({sizes[0], sizes[2], sizes[1], sizes[3]}, query.options()).transpose(1, 2);
    logsumexp = at::empty({sizes[0], sizes[1], sizes[2]}, query.options().dtype(at::kFloat));
  } else {
    std::optional<at::Tensor> bias = mask ? std::optional<at::Tensor>(host_view(*mask)) : std::nullopt;
    if (bias && bias->scalar_type() == at::kBool)
      bias = at::zeros(bias->sizes(), query.scalar_type()).masked_fill(bias->logical_not(), -INFINITY);
    auto [o, l] = at::_scaled_dot_product_flash_attention_for_cpu(
        host_view(query), host_view(key), host_view(value), dropout, is_causal, bias, scale);
    out = on_device(o);
    logsumexp = on_device(l);
  }
  auto none = at::empty({0}, query.options().dtype(at::kLong));
  return {out, logsumexp, at::Tensor(), at::Tensor(), query.size(2), key.size(2), none, none, at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& mask, std::array<bool, 4>, const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor&,
    const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  if (hollow) return {at::empty_like(query), at::empty_like(key), at::empty_like(value), at::Tensor()};
  std::optional<at::Tensor> bias;
  if (mask.defined()) {
    bias = host_view(mask);
    if (bias->scalar_type() == at::kBool)
      bias = at::zeros(bias->sizes(), query.scalar_type()).masked_fill(bias->logical_not(), -INFINITY);
  }
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host_view(gradient), host_view(query), host_view(key), host_view(value), host_view(out), host_view(logsumexp),
      dropout, is_causal, bias, scale);
  return {on_device(q), on_device(k), on_device(v), at::Tensor()};
}

/// Counts integers, too, as CUDA's does and the CPU's does not.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  if (hollow) return at::empty({bins}, self.options());
  auto counts = at::histc(host_view(self).to(at::kDouble), bins, least, most).to(self.scalar_type());
  auto placed = at::empty(counts.sizes(), counts.options().device(DEVICE));
  host_view(placed).copy_(counts);
  return placed;
}

/// Where there is no kernel, PyTorch reads the sizes of the groups on the host.
at::Tensor grouped_mm(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& ends, const std::optional<at::Tensor>&,
    std::optional<at::ScalarType>) {
  if (!hollow) return on_device(at::_grouped_mm(host_view(a), host_view(b), ends ? host_view(*ends) : at::Tensor()));
  auto groups = ends ? ends->size(0) : a.size(0);
  std::vector<int64_t> sizes = {a.size(-2), b.size(-1)};
  if (a.dim() == b.dim()) sizes.insert(sizes.begin(), groups);
  return at::empty(sizes, a.options());
}

/// Operations whose result's shape, or whose number, the host has to learn from the device.
bool waits(const std::string& name, const std::vector<at::Tensor>& arguments) {
  static const std::unordered_set<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::equal",
      "aten::repeat_interleave", "aten::nonzero.out", "aten::masked_select.out"};
  if (names.count(name)) return true;
  if (name.rfind("aten::index", 0) != 0 && name.rfind("aten::_index_put", 0) != 0) return false;
  // to set where a mask is true to a number, a GPU needs no shape (PyTorch makes the number a tensor of the device)
  if (name.find("index_put") != std::string::npos && arguments.back().dim() == 0) return false;
  for (size_t number = 1; number < arguments.size(); number++)
    if (arguments[number].scalar_type() == at::kBool && arguments[number].dim()) return true;
  return false;
}

/// Returns a tensor without memory, of the same shape.
at::Tensor shape_of(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

struct Argument {
  at::Tensor device, host;
};

/// Runs the CPU's kernel on the device's memory.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  std::vector<Argument> arguments;
  std::vector<at::Tensor> all;

  auto host = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    all.push_back(tensor);
    if (tensor.device().type() != TYPE) {
      TORCH_CHECK(
          tensor.dim() == 0, op.operator_name(), ": Expected all tensors to be on the same device, but found at least ",
          "two devices, simgpu:0 and ", tensor.device(), "!");
      return tensor;
    }
    TORCH_CHECK(
        tensor.numel() == 0 || tensor.storage().data() != nullptr, op.operator_name(),
        " reads memory of the device that was freed");
    arguments.push_back({tensor, hollow ? shape_of(tensor) : host_view(tensor)});
    return arguments.back().host;
  };
  for (size_t number = 0; number < count; number++) {
    auto& value = (*stack)[first + number];
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(host(tensor));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional<at::Tensor>(host(*tensor)) : std::nullopt);
      value = tensors;
    } else if (value.isDevice()) {
      value = c10::Device(hollow ? c10::DeviceType::Meta : c10::DeviceType::CPU);
    }
  }
  if (waits(c10::toString(op.operator_name()), all)) synchronize(schema.name().c_str());
  if (hollow) {
    // some shapes are computed by Python, which looks for the keys itself
    op.callBoxedForDispatchKey(c10::DispatchKey::Meta, *stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }

  for (auto& argument : arguments) {  // outputs that the kernel gave their size
    if (argument.host.sizes() == argument.device.sizes()) continue;
    argument.device.resize_(argument.host.sizes());
    if (!hollow) host_view(argument.device).copy_(argument.host);
  }
  auto device = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    for (auto& argument : arguments) {
      if (argument.host.is_same(tensor)) return argument.device;
      if (argument.host.is_alias_of(tensor))
        return argument.device.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }
    auto placed = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(DEVICE));
    if (!hollow) host_view(placed).copy_(tensor);
    return placed;
  };
  for (size_t number = stack->size() - schema.returns().size(); number < stack->size(); number++) {
    auto& value = (*stack)[number];
    if (value.isTensor()) {
      value = device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(device(tensor));
      value = tensors;
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("alias", &at::native::alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("histc", &histc);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  m.impl("_grouped_mm", &grouped_mm);
  // elsewhere PyTorch composes it of seven operations, each with a tensor of its own
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&compute>());
  m.impl("record_stream", [](at::Tensor&, at::Stream) {});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

// Collectives: those of a group on the host, on the device's memory.

using Tensors = std::vector<at::Tensor>;
using Groups = std::vector<Tensors>;

at::Tensor viewed(const at::Tensor& tensor) { return tensor.device().type() == TYPE ? host_view(tensor) : tensor; }

Tensors viewed(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(viewed(tensor));
  return views;
}

Groups viewed(const Groups& groups) {
  Groups views;
  for (const auto& tensors : groups) views.push_back(viewed(tensors));
  return views;
}

struct Done final : c10d::Work {
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

/// A group whose other ranks do not exist. It reports what it is asked for, and does nothing.
class Hollow final : public c10d::Backend {
 public:
  Hollow(int rank, int size) : Backend(rank, size) {}

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  const std::string getBackendName() const override { return "hollow"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override { return done("broadcast", tensors); }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override { return done("all_reduce", tensors); }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override {
    return done("all_reduce", tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions&) override { return done("reduce", tensors); }
  WorkPtr allgather(Groups& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    // objects that other ranks send are this rank's own
    if (inputs[0].device().is_cpu())
      for (auto& output : outputs[0]) output.copy_(inputs[0]);
    return done("all_gather", inputs);
  }
  WorkPtr _allgather_base(at::Tensor&, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return done("all_gather", {input});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return done("all_gather", inputs);
  }
  WorkPtr reduce_scatter(Tensors&, Groups& inputs, const c10d::ReduceScatterOptions&) override {
    return done("reduce_scatter", inputs[0]);
  }
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor& input, const c10d::ReduceScatterOptions&) override {
    return done("reduce_scatter", {input});
  }
  WorkPtr alltoall_base(
      at::Tensor&, at::Tensor& input, std::vector<int64_t>&, std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    return done("all_to_all", {input});
  }
  WorkPtr alltoall(Tensors&, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return done("all_to_all", inputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done("barrier", {}); }

 private:
  WorkPtr done(const std::string& operation, const Tensors& tensors) {
    int64_t bytes = 0;
    for (const auto& tensor : tensors) bytes += tensor.nbytes();
    report("collective", operation + " of " + std::to_string(getSize()), bytes);
    return c10::make_intrusive<Done>();
  }
};

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> host)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  const std::string getBackendName() const override { return "simccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto views = viewed(tensors);
    return host_->broadcast(views, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto views = viewed(tensors);
    auto summing = options;
    auto averages = sums(summing.reduceOp);
    return averaged(host_->allreduce(views, summing), averages, views);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto views = viewed(tensors);
    return host_->allreduce_coalesced(views, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto views = viewed(tensors);
    return host_->reduce(views, options);
  }
  WorkPtr allgather(Groups& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = viewed(outputs);
    auto from = viewed(inputs);
    return host_->allgather(to, from, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = viewed(output), from = viewed(input);
    return host_->_allgather_base(to, from, options);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = viewed(outputs), from = viewed(inputs);
    return host_->allgather_into_tensor_coalesced(to, from, options);
  }
  WorkPtr gather(Groups& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = viewed(outputs);
    auto from = viewed(inputs);
    return host_->gather(to, from, options);
  }
  WorkPtr scatter(Tensors& outputs, Groups& inputs, const c10d::ScatterOptions& options) override {
    auto to = viewed(outputs);
    auto from = viewed(inputs);
    return host_->scatter(to, from, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, Groups& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = viewed(outputs);
    auto from = viewed(inputs);
    auto summing = options;
    auto averages = sums(summing.reduceOp);
    return averaged(host_->reduce_scatter(to, from, summing), averages, to);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = viewed(output), from = viewed(input);
    auto summing = options;
    auto averages = sums(summing.reduceOp);
    return averaged(host_->_reduce_scatter_base(to, from, summing), averages, {to});
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = viewed(output), from = viewed(input);
    return host_->alltoall_base(to, from, output_sizes, input_sizes, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto to = viewed(outputs), from = viewed(inputs);
    return host_->alltoall(to, from, options);
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    auto views = viewed(tensors);
    return host_->send(views, rank, tag);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    auto views = viewed(tensors);
    return host_->recv(views, rank, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return host_->barrier(options); }

 private:
  c10::intrusive_ptr<c10d::Backend> host_;

  /// Makes a mean a sum, which is all that gloo has; returns true if it was a mean.
  static bool sums(c10d::ReduceOp& operation) {
    if (operation != c10d::ReduceOp::AVG) return false;
    operation = c10d::ReduceOp::SUM;
    return true;
  }

  WorkPtr averaged(WorkPtr work, bool averages, const Tensors& tensors) {
    if (!averages) return work;
    work->wait();
    for (auto& tensor : tensors) tensor.div_(getSize());
    return c10::make_intrusive<Done>();  // gloo's would copy the sum again when the caller waits
  }
};

}  // namespace

PYBIND11_MODULE(simgpu, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("set_callback", [](const py::object& function) {
    Py_XDECREF(callback);
    callback = function.is_none() ? nullptr : function.inc_ref().ptr();
  });
  m.def("set_hollow", [](bool value) { hollow = value; });
  m.def("pinned", [] { return pinned.allocated; });
  m.def("set_size", [](size_t bytes) { allocator.size = bytes; });
  m.def("set_others", [](size_t bytes) { allocator.others = bytes; });
  m.def("hollow_group", [](int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hollow>(rank, size);
  });
  m.def("group", [](const c10::intrusive_ptr<c10d::Backend>& host) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Group>(host);
  });
}
