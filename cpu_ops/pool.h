// A persistent set of worker threads and the queue of what they do.
#ifndef CPU_OPS_POOL_H_
#define CPU_OPS_POOL_H_

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "extents.h"

namespace sojax {

// Work in many items that any thread may do in any order.
class Job {
 public:
  // run(item, thread) is called once for each item below num_items, on thread
  // `thread` of the pool. `extents` are the bytes that it reads and writes.
  Job(std::size_t num_items,
      std::function<void(std::size_t item, std::size_t thread)> run,
      std::vector<Extent> extents);

  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Whether all has been done, or one item threw and nothing goes on.
  bool IsDone() const { return done_; }

  // Returns when it is done, at once if it is. If an item threw, rethrows that
  // exception (of several, one), each time. Throws std::logic_error if the job
  // was left behind in the parent of this process. Any thread may wait, also
  // when the pool is gone.
  void Wait();

 private:
  friend class Pool;

  // Does items until none is left. If one throws, the rest are left out.
  void Work(std::size_t thread);
  void Finish();

  const std::size_t num_items_;
  const std::function<void(std::size_t, std::size_t)> run_;
  const std::vector<Extent> extents_;  // sorted
  const pid_t process_;

  std::atomic<std::size_t> next_item_{0};

  // Guarded by the pool's mutex.
  bool waits_for_earlier_ = false;
  std::size_t num_working_ = 0;

  std::mutex mutex_;  // guards error_ and goes with finished_
  std::condition_variable finished_;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

// Does jobs on all its threads, which sleep on a condition variable when there
// are none. Jobs start in the order of their submission; the threads that find
// no item left in one go on to the next. A job that writes what an earlier one
// reads or writes, or the reverse, waits until the earlier one is done, so that
// the result is that of one job after the other. Thread-safe.
class Pool {
 public:
  // Starts the threads. If `cores` is not empty, it has one entry for each
  // thread: the only core that it may run on. Throws std::invalid_argument if
  // it has another length, std::system_error if a thread cannot be started or
  // bound.
  Pool(std::size_t num_threads, const std::vector<int>& cores);

  // Closes the pool.
  ~Pool();

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::size_t num_threads() const { return num_threads_; }

  // Puts a job at the end of the queue. Throws std::invalid_argument if the
  // pool is closed, std::logic_error if it was made by the parent of this
  // process (its threads did not survive the fork).
  void Submit(std::shared_ptr<Job> job);

  // Binds the threads to other cores, one for each, as the constructor does.
  void BindToCores(const std::vector<int>& cores);

  // Ends and joins the threads, after all jobs that were submitted. Calling it
  // again does nothing.
  void Close();

 private:
  void CheckCores(const std::vector<int>& cores) const;
  void CheckProcess() const;
  void Work(std::size_t thread);
  Job* NextJob();
  void Start(std::size_t index);

  const std::size_t num_threads_;
  const pid_t process_;
  std::mutex close_;  // held by the caller that joins the threads

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;  // all that are not done
  bool closing_ = false;

  std::vector<std::thread> threads_;  // last, so that they see the rest
};

}  // namespace sojax

#endif  // CPU_OPS_POOL_H_
