// Where programs deliver gradients while they run, and where the host waits.
#ifndef CPU_OPS_GRADIENT_SINK_H_
#define CPU_OPS_GRADIENT_SINK_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

namespace sojax {

// Memory for one gradient. The sink does not own it.
struct Destination {
  void* data;
  std::size_t num_bytes;
};

// The places of one program on one device.
struct ShardRoute {
  // The device address of an operand that the program hands to its deliveries.
  const void* address;
  // One for each gradient that the program delivers, by place.
  std::vector<Destination> destinations;
};

// How a wait ended.
enum class WaitResult { kDelivered, kInterrupted, kClosed };

// Routes, and which of their gradients have been delivered. A route is the
// places of one program on all its devices. Thread-safe.
//
// A delivery names its route by the address of a device buffer. A handler for a
// GPU runs on the host before the device could have read the buffer's content,
// and an attribute that names the route would be compiled into the program:
// equal stages could not share theirs. So there has to be one table of
// addresses for all sinks.
class GradientSink : public std::enable_shared_from_this<GradientSink> {
 public:
  GradientSink() = default;

  GradientSink(const GradientSink&) = delete;
  GradientSink& operator=(const GradientSink&) = delete;

  // Adds a route and returns its number. Destinations must stay valid until
  // Close returns 0. Throws std::invalid_argument if the shards have not
  // equally many destinations, or an address already has a route in any open
  // sink; std::logic_error if the sink is closed.
  std::size_t AddRoute(const std::vector<ShardRoute>& shards);

  // Blocks until every shard has delivered all these places, then takes them:
  // they can be delivered again. Returns at once, and takes nothing, if the
  // ticket is interrupted or the sink closed. Throws std::out_of_range for a
  // route or place that is not there.
  WaitResult Wait(std::size_t route, const std::vector<std::size_t>& places,
                  std::uint64_t ticket);

  // Ends all waits whose ticket is `first_ticket` or more, now and until Reset.
  void Interrupt(std::uint64_t first_ticket);

  // Forgets interrupts and what was delivered and not taken. Programs that
  // deliver must have ended.
  void Reset();

  // Removes the routes, ends all waits, and blocks until no thread copies into
  // a destination any more. Returns the number of copies that may still be
  // under way on a device. Later deliveries find no route.
  std::size_t Close();

 private:
  friend class Delivery;

  enum class Progress { kEmpty, kFilling, kFull };

  struct Place {
    Destination destination;
    Progress progress;
  };

  struct Shard {
    const void* address;
    std::vector<Place> places;
  };

  using Route = std::vector<Shard>;

  static constexpr std::uint64_t kNoTicket =
      std::numeric_limits<std::uint64_t>::max();

  bool AllFull(const Route& route,
               const std::vector<std::size_t>& places) const;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Route> routes_;
  std::uint64_t interrupted_from_ = kNoTicket;
  std::size_t num_host_copies_ = 0;
  std::size_t num_device_copies_ = 0;
  bool closed_ = false;
};

// One gradient on its way to its destination. It keeps the sink's memory, not
// the destination, alive.
class Delivery {
 public:
  // Who copies. The host's copies end in any case, so that Close can wait for
  // them; a device that has failed may never say that its copy ended.
  enum class Copier { kHost, kDevice };

  // Begins a delivery. Throws std::invalid_argument if the address has no
  // route, the route no such place, or the place another size;
  // std::logic_error if the place holds a gradient that was not taken.
  static Delivery Begin(const void* address, std::int64_t place,
                        std::size_t num_bytes, Copier copier);

  // Where to copy to.
  void* data() const { return data_; }

  // Says that the gradient is there.
  void Finish();

  // Says that nothing was copied, nor will be.
  void Cancel();

 private:
  Delivery() = default;

  void End(bool delivered);

  std::shared_ptr<GradientSink> sink_;
  std::size_t route_ = 0;
  std::size_t shard_ = 0;
  std::size_t place_ = 0;
  Copier copier_ = Copier::kHost;
  void* data_ = nullptr;
};

}  // namespace sojax

#endif  // CPU_OPS_GRADIENT_SINK_H_
