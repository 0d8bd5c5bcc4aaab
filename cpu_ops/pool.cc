#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace sojax {
namespace {

void BindToCore(std::thread& thread, int core) {
  if (core < 0 || core >= CPU_SETSIZE) {
    throw std::invalid_argument("core " + std::to_string(core) +
                                " is not in [0, " +
                                std::to_string(CPU_SETSIZE) + ")");
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(core), &set);
  const int error =
      pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  if (error != 0) {
    throw std::system_error(
        error, std::generic_category(),
        "cannot bind a thread to core " + std::to_string(core));
  }
}

}  // namespace

Pool::Pool(std::size_t num_threads, const std::vector<int>& cores)
    : num_threads_(num_threads), process_(getpid()) {
  if (!cores.empty() && cores.size() != num_threads) {
    throw std::invalid_argument(std::to_string(cores.size()) + " cores for " +
                                std::to_string(num_threads) +
                                " threads: give one for each thread, or none");
  }
  try {
    threads_.reserve(num_threads);
    for (std::size_t i = 0; i < num_threads; ++i) Start(i, cores);
  } catch (...) {
    Close();
    throw;
  }
}

Pool::~Pool() { Close(); }

void Pool::Start(std::size_t index, const std::vector<int>& cores) {
  threads_.emplace_back(&Pool::Work, this, index);
  std::thread& thread = threads_.back();
  pthread_setname_np(thread.native_handle(),
                     ("sojax-" + std::to_string(index)).c_str());
  if (!cores.empty()) BindToCore(thread, cores[index]);
}

void Pool::Run(const std::function<void(std::size_t)>& task) {
  if (getpid() != process_) {
    throw std::logic_error(
        "this pool belongs to the parent process; make a new one after fork");
  }
  const std::lock_guard<std::mutex> turn(turn_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (closing_) {
    throw std::invalid_argument("this pool is closed; make a new one");
  }
  task_ = &task;
  num_busy_ = num_threads_;
  ++run_;
  started_.notify_all();
  finished_.wait(lock, [this] { return num_busy_ == 0; });
  task_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::Close() {
  if (getpid() != process_) {
    // A forked child has the objects but not the threads; neither can be
    // joined or destroyed, so they are left alone.
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  const std::lock_guard<std::mutex> turn(turn_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  started_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Pool::Work(std::size_t index) {
  std::uint64_t last_run = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    started_.wait(lock, [&] { return closing_ || run_ != last_run; });
    if (closing_) return;
    last_run = run_;
    const auto& task = *task_;
    std::exception_ptr error;
    lock.unlock();
    try {
      task(index);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
    error = nullptr;
    if (--num_busy_ == 0) finished_.notify_one();
  }
}

}  // namespace sojax
