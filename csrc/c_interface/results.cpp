// Results, errors and callbacks of the C interface.
#include <exception>
#include <new>

#include "c_interface/handles.h"
#include "common/error.h"

namespace ncclep::c_interface {

namespace {

thread_local std::string last_error;

ncclepResult_t failed(ncclepResult_t result, const char* text) {
  last_error = text;
  return result;
}

}  // namespace

ncclepResult_t result_of_exception() {
  try {
    throw;
  } catch (const ArgumentError& error) {
    return failed(ncclepInvalidArgument, error.what());
  } catch (const UsageError& error) {
    return failed(ncclepInvalidUsage, error.what());
  } catch (const PeerError& error) {
    return failed(ncclepRemoteError, error.what());
  } catch (const InterruptedError& error) {
    return failed(ncclepInterrupted, error.what());
  } catch (const std::bad_alloc&) {
    return failed(ncclepSystemError, "out of host memory");
  } catch (const std::exception& error) {
    return failed(ncclepSystemError, error.what());
  } catch (...) {  // of the caller's own functions, in C++
    return failed(ncclepSystemError, "a function of the caller threw what is no std::exception");
  }
}

std::function<void()> poll_of(ncclepPoll_t poll, void* user) {
  return [=] {
    if (poll != nullptr && poll(user) != 0) throw InterruptedError("the caller ended the call");
  };
}

native::AllGather all_gather_of(const ncclepGroup& group) {
  const ncclepGroupConfig_t& config = group.config;
  const auto* const of = group.group.get();
  return [&config, of](const void* mine, std::size_t num_bytes, void* all, const char* what) {
    if (config.all_gather == nullptr) {
      of->communicator()->all_gather(mine, num_bytes, all, what, of->timeout(),
                                     poll_of(config.poll, config.user));
      return;
    }
    if (config.all_gather(config.user, mine, num_bytes, all, what, of->timeout()) !=
        ncclepSuccess) {
      throw InterruptedError(join_text("the caller's all_gather failed in ", what));
    }
  };
}

}  // namespace ncclep::c_interface

const char* ncclepGetErrorString(ncclepResult_t result) {
  switch (result) {
    case ncclepSuccess:
      return "success";
    case ncclepInvalidArgument:
      return "invalid argument";
    case ncclepInvalidUsage:
      return "call not allowed now";
    case ncclepSystemError:
      return "error of CUDA, NCCL or the system";
    case ncclepRemoteError:
      return "another rank did not come, refused a call, or made a different one";
    case ncclepInterrupted:
      return "ended by a callback of the caller";
    case ncclepNumResults:
      break;
  }
  return "not a result of this library";
}

const char* ncclepGetLastError(void) { return ncclep::c_interface::last_error.c_str(); }

ncclepResult_t ncclepGetVersion(int* version) {
  return ncclep::c_interface::guarded(
      [&] { ncclep::c_interface::out(version, "version") = NCCLEP_VERSION; });
}
