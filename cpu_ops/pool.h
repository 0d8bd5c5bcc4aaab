// A persistent set of worker threads.
#ifndef CPU_OPS_POOL_H_
#define CPU_OPS_POOL_H_

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace sojax {

// Runs one function on all its threads at a time. The threads sleep on a
// condition variable in between. Thread-safe; concurrent calls take turns.
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

  // Calls task(0) ... task(num_threads - 1), each on its own thread, and
  // returns when all have returned. If some threw, rethrows one of the
  // exceptions. Throws std::invalid_argument if the pool is closed,
  // std::logic_error if it was made by the parent of this process (its threads
  // did not survive the fork).
  void Run(const std::function<void(std::size_t)>& task);

  // Ends and joins the threads, after the run in progress if there is one.
  // Calling it again does nothing.
  void Close();

 private:
  void Work(std::size_t index);
  void Start(std::size_t index, const std::vector<int>& cores);

  const std::size_t num_threads_;
  const pid_t process_;
  std::mutex turn_;  // held by the caller whose task runs

  std::mutex mutex_;  // guards what follows
  std::condition_variable started_;
  std::condition_variable finished_;
  const std::function<void(std::size_t)>* task_ = nullptr;
  std::uint64_t run_ = 0;  // counts calls of Run
  std::size_t num_busy_ = 0;
  std::exception_ptr error_;
  bool closing_ = false;

  std::vector<std::thread> threads_;  // last, so that they see the rest
};

}  // namespace sojax

#endif  // CPU_OPS_POOL_H_
