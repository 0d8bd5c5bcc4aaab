#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
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

Job::Job(std::size_t num_items,
         std::function<void(std::size_t, std::size_t)> run,
         std::vector<Extent> extents)
    : num_items_(num_items),
      run_(std::move(run)),
      extents_([&] {
        SortExtents(extents);
        return std::move(extents);
      }()),
      process_(getpid()) {}

void Job::Wait() {
  if (!done_ && getpid() != process_) {
    throw std::logic_error(
        "this job belongs to the parent process; its threads did not survive"
        " the fork");
  }
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [this] { return done_.load(); });
  if (error_) std::rethrow_exception(error_);
}

void Job::Work(std::size_t thread) {
  try {
    for (std::size_t i = next_item_++; i < num_items_; i = next_item_++) {
      run_(i, thread);
    }
  } catch (...) {
    next_item_ = num_items_;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void Job::Finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  // With the lock, since a waiter may destroy the job as soon as it has it.
  finished_.notify_all();
}

Pool::Pool(std::size_t num_threads, const std::vector<int>& cores)
    : num_threads_(num_threads), process_(getpid()) {
  if (!cores.empty()) CheckCores(cores);
  try {
    threads_.reserve(num_threads);
    for (std::size_t i = 0; i < num_threads; ++i) {
      Start(i);
      if (!cores.empty()) BindToCore(threads_.back(), cores[i]);
    }
  } catch (...) {
    Close();
    throw;
  }
}

Pool::~Pool() { Close(); }

void Pool::CheckCores(const std::vector<int>& cores) const {
  if (cores.size() != num_threads_) {
    throw std::invalid_argument(std::to_string(cores.size()) + " cores for " +
                                std::to_string(num_threads_) +
                                " threads: give one for each thread, or none");
  }
}

void Pool::CheckProcess() const {
  if (getpid() != process_) {
    throw std::logic_error(
        "this pool belongs to the parent process; make a new one after fork");
  }
}

void Pool::Start(std::size_t index) {
  threads_.emplace_back(&Pool::Work, this, index);
  pthread_setname_np(threads_.back().native_handle(),
                     ("sojax-" + std::to_string(index)).c_str());
}

void Pool::Submit(std::shared_ptr<Job> job) {
  CheckProcess();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) {
    throw std::invalid_argument("this pool is closed; make a new one");
  }
  if (job->num_items_ == 0) {
    job->Finish();
    return;
  }
  job->waits_for_earlier_ = std::any_of(
      queue_.begin(), queue_.end(), [&](const std::shared_ptr<Job>& earlier) {
        return Conflict(earlier->extents_, job->extents_);
      });
  queue_.push_back(std::move(job));
  changed_.notify_all();
}

void Pool::BindToCores(const std::vector<int>& cores) {
  CheckProcess();
  CheckCores(cores);
  const std::lock_guard<std::mutex> close(close_);
  if (threads_.empty()) {
    throw std::invalid_argument("this pool is closed; make a new one");
  }
  for (std::size_t i = 0; i < num_threads_; ++i) {
    BindToCore(threads_[i], cores[i]);
  }
}

void Pool::Close() {
  if (getpid() != process_) {
    // A forked child has the objects but not the threads; neither can be
    // joined or destroyed, so they are left alone.
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  const std::lock_guard<std::mutex> close(close_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// Returns the first job that has items left, unless it, or one before it, has
// to wait. A job that waits is first in the queue when all before it are done.
Job* Pool::NextJob() {
  for (const std::shared_ptr<Job>& job : queue_) {
    if (job->waits_for_earlier_ && job != queue_.front()) return nullptr;
    if (job->next_item_ < job->num_items_) return job.get();
  }
  return nullptr;
}

void Pool::Work(std::size_t thread) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Job* job = NextJob();
    if (job == nullptr) {
      if (closing_ && queue_.empty()) return;
      changed_.wait(lock);
      continue;
    }
    ++job->num_working_;
    lock.unlock();
    job->Work(thread);
    lock.lock();
    if (--job->num_working_ != 0) continue;
    // Nobody works on it, and no item is left.
    const auto place = std::find_if(
        queue_.begin(), queue_.end(),
        [&](const std::shared_ptr<Job>& other) { return other.get() == job; });
    const std::shared_ptr<Job> finished = std::move(*place);
    queue_.erase(place);
    finished->Finish();
    changed_.notify_all();
  }
}

}  // namespace sojax
