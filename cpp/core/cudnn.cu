#include <dlfcn.h>

#include <map>
#include <mutex>

#include "core/check.h"
#include "core/cuda_graph.h"
#include "core/cudnn.h"
#include "core/cudnn_frontend.h"
#include "core/libraries.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace te::cudnn {

namespace {

// "" once cuDNN's frontend has its library.
const std::string& library_error() {
  static const std::string& error = *new std::string([] {
    fe::cudnn_dlhandle = open_library({"libcudnn.so.9"}, {"nvidia/cudnn/lib/libcudnn.so.9"});
    if (!fe::cudnn_dlhandle) {
      return "cuDNN (libcudnn.so.9) was not found; install JAX with its CUDA libraries, `pip install 'jax[cuda13]'`, "
             "or put cuDNN on LD_LIBRARY_PATH";
    }
    // The frontend finds CUDA's runtime by its name alone, so it must be loaded.
    const bool runtime = open_library({"libcudart.so.13", "libcudart.so.12"},
                                      {"nvidia/cu13/lib/libcudart.so.13", "nvidia/cuda_runtime/lib/libcudart.so.12"});
    return runtime ? "" : "CUDA's runtime (libcudart.so.13 or .12) was not found, which cuDNN's frontend needs";
  }());
  return error;
}

// The first failure among calls that build on each other.
class Status {
 public:
  explicit Status(const char* op) : op_(op) {}
  bool ok(fe::error_t status, const char* what) { return ok(status.is_good(), what, status.get_message()); }
  bool ok(bool good, const char* what, const std::string& why) {
    if (!good && text_.empty()) text_ = std::string(what) + ": " + why;
    return text_.empty();
  }
  bool ok() const { return text_.empty(); }
  ffi::Error error() const {
    return ffi::Error::Internal(std::string(op_) + ": cuDNN " + fe::detail::get_backend_version_string() + ": " +
                                text_);
  }

 private:
  const char* op_;
  std::string text_;
};

struct Plan {
  fe::graph::Graph graph;
  int64_t workspace = 0;
};

// What is kept of one GPU; the mutex guards all, the handle's stream too.
struct Device {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
  std::map<std::vector<int64_t>, std::unique_ptr<Plan>> plans;
};

Device& current_device() {
  static std::mutex mutex;
  static auto& devices = *new std::map<int, Device>;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  return devices[device];
}

bool status_ok(Status& status, cudnnStatus_t code, const char* what) {
  return status.ok(code == CUDNN_STATUS_SUCCESS, what, fe::detail::get_error_string(code));
}

std::unique_ptr<Plan> make_plan(Status& status, cudnnHandle_t handle, const Call& call) {
  auto plan = std::make_unique<Plan>();
  call.build(plan->graph);
  status.ok(plan->graph.build(handle, {fe::HeurMode_t::A}), "building the graph");
  if (status.ok()) status.ok(plan->graph.get_workspace_size(plan->workspace), "workspace");
  // Loads the kernels, which could not be done while a graph is captured: captures them, on a stream that the frontend
  // makes where the handle has none. Where it fails, they load when they run.
  if (status.ok() && status_ok(status, fe::detail::set_stream(handle, nullptr), "stream")) {
    (void)plan->graph.warmup(handle);
  }
  return plan;
}

Check check_size(const Call& call, Workspace workspace, const Plan& plan) {
  Check check(call.op);
  return check.that(
      workspace.bytes >= plan.workspace, "workspace",
      [&] { return "the " + std::to_string(plan.workspace) + " bytes that cuDNN asks for"; },
      std::to_string(workspace.bytes));
}

ffi::Error prepare_unguarded(const Call& call, Workspace workspace) {
  Status status(call.op);
  Device& device = current_device();
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (!device.handle && !status_ok(status, fe::detail::create_handle(&device.handle), "handle")) return status.error();
  std::unique_ptr<Plan>& plan = device.plans[call.key];
  if (!plan) {
    auto made = make_plan(status, device.handle, call);
    if (!status.ok()) return status.error();
    plan = std::move(made);
  }
  const Check check = check_size(call, workspace, *plan);
  return check.failed() ? check.error() : ffi::Error::Success();
}

ffi::Error execute_unguarded(const Call& call, Pointers& pointers, Workspace workspace, cudaStream_t stream) {
  Status status(call.op);
  Device& device = current_device();
  const std::lock_guard<std::mutex> lock(device.mutex);
  const auto found = device.plans.find(call.key);
  if (!device.handle || found == device.plans.end() || !found->second) {
    return ffi::Error::Internal(std::string(call.op) + ": executed before it was initialized");
  }
  const Plan& plan = *found->second;
  const Check check = check_size(call, workspace, plan);
  if (check.failed()) return check.error();
  // The plans count finished tiles, from zeros that a memset makes.
  const cudaError_t issued = issue_as_kernels(stream, [&](cudaStream_t s) {
    return status_ok(status, fe::detail::set_stream(device.handle, s), "stream") &&
           status.ok(plan.graph.execute(device.handle, pointers, workspace.data), "execution");
  });
  if (status.ok()) status.ok(issued == cudaSuccess, "capture", cudaGetErrorString(issued));
  return status.ok() ? ffi::Error::Success() : status.error();
}

// The frontend throws where a library lacks a function.
template <typename Function>
ffi::Error guarded(const Call& call, Function&& function) {
  if (!library_error().empty()) return ffi::Error::Internal(std::string(call.op) + ": " + library_error());
  try {
    return function();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string(call.op) + ": cuDNN: " + error.what());
  }
}

}  // namespace

ffi::Error prepare(const Call& call, Workspace workspace) {
  return guarded(call, [&] { return prepare_unguarded(call, workspace); });
}

ffi::Error execute(const Call& call, Pointers pointers, Workspace workspace, cudaStream_t stream) {
  return guarded(call, [&] { return execute_unguarded(call, pointers, workspace, stream); });
}

}  // namespace te::cudnn
