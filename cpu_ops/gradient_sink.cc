#include "gradient_sink.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

namespace sojax {
namespace {

struct Entry {
  std::weak_ptr<GradientSink> sink;
  std::size_t route;
  std::size_t shard;
};

// Which route an address stands for. Locked after a sink, never before one.
struct Addresses {
  std::mutex mutex;
  std::unordered_map<const void*, Entry> entries;
};

// Never destroyed: a program may still run while the process exits.
Addresses& AllAddresses() {
  static auto* const addresses = new Addresses;
  return *addresses;
}

void Register(const std::shared_ptr<GradientSink>& sink, std::size_t route,
              const std::vector<ShardRoute>& shards) {
  Addresses& all = AllAddresses();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (!all.entries.emplace(shards[i].address, Entry{sink, route, i}).second) {
      for (std::size_t k = 0; k < i; ++k) all.entries.erase(shards[k].address);
      throw std::invalid_argument(
          "shard " + std::to_string(i) +
          " has the address of another route; give each an operand of its own");
    }
  }
}

void Unregister(const void* address) {
  Addresses& all = AllAddresses();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.entries.erase(address);
}

// Throws if the address has none.
Entry EntryOf(const void* address) {
  Addresses& all = AllAddresses();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.entries.find(address);
  if (found == all.entries.end()) {
    throw std::invalid_argument(
        "a gradient has no route: its operand is not one of an open sink");
  }
  return found->second;
}

}  // namespace

std::size_t GradientSink::AddRoute(const std::vector<ShardRoute>& shards) {
  Route route;
  for (const ShardRoute& shard : shards) {
    const std::size_t num_places = shard.destinations.size();
    if (num_places != shards.front().destinations.size()) {
      throw std::invalid_argument(
          "the shards of a route have " +
          std::to_string(shards.front().destinations.size()) + " and " +
          std::to_string(num_places) + " destinations; give each as many");
    }
    Shard& added = route.emplace_back();
    added.address = shard.address;
    for (const Destination& destination : shard.destinations) {
      added.places.push_back({destination, Progress::kEmpty});
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) throw std::logic_error("the sink is closed; make a new one");
  Register(shared_from_this(), routes_.size(), shards);
  routes_.push_back(std::move(route));
  return routes_.size() - 1;
}

WaitResult GradientSink::Wait(std::size_t route,
                              const std::vector<std::size_t>& places,
                              std::uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (const Shard& shard : routes_.at(route)) {
    for (const std::size_t place : places) shard.places.at(place);
  }
  const auto interrupted = [&] { return ticket >= interrupted_from_; };
  changed_.wait(lock, [&] {
    return closed_ || interrupted() || AllFull(routes_[route], places);
  });
  if (closed_) return WaitResult::kClosed;
  if (interrupted()) return WaitResult::kInterrupted;
  for (Shard& shard : routes_[route]) {
    for (const std::size_t place : places) {
      shard.places[place].progress = Progress::kEmpty;
    }
  }
  return WaitResult::kDelivered;
}

void GradientSink::Interrupt(std::uint64_t first_ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  interrupted_from_ = std::min(interrupted_from_, first_ticket);
  changed_.notify_all();
}

void GradientSink::Reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  interrupted_from_ = kNoTicket;
  for (Route& route : routes_) {
    for (Shard& shard : route) {
      for (Place& place : shard.places) {
        if (place.progress == Progress::kFull) {
          place.progress = Progress::kEmpty;
        }
      }
    }
  }
}

std::size_t GradientSink::Close() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closed_) {
    closed_ = true;
    for (const Route& route : routes_) {
      for (const Shard& shard : route) Unregister(shard.address);
    }
    changed_.notify_all();
  }
  changed_.wait(lock, [this] { return num_host_copies_ == 0; });
  return num_device_copies_;
}

bool GradientSink::AllFull(const Route& route,
                           const std::vector<std::size_t>& places) const {
  return std::all_of(route.begin(), route.end(), [&](const Shard& shard) {
    return std::all_of(places.begin(), places.end(), [&](std::size_t place) {
      return shard.places[place].progress == Progress::kFull;
    });
  });
}

Delivery Delivery::Begin(const void* address, std::int64_t place,
                         std::size_t num_bytes, Copier copier) {
  const Entry entry = EntryOf(address);
  Delivery delivery;
  delivery.sink_ = entry.sink.lock();
  if (!delivery.sink_) throw std::logic_error("a gradient's sink is closed");
  GradientSink& sink = *delivery.sink_;
  const std::lock_guard<std::mutex> lock(sink.mutex_);
  if (sink.closed_) throw std::logic_error("a gradient's sink is closed");
  auto& places = sink.routes_[entry.route][entry.shard].places;
  const auto index = static_cast<std::size_t>(place);
  const std::string name = "place " + std::to_string(place) + " of route " +
                           std::to_string(entry.route);
  if (place < 0 || index >= places.size()) {
    throw std::invalid_argument(name + " is not there; it has " +
                                std::to_string(places.size()));
  }
  GradientSink::Place& target = places[index];
  if (target.destination.num_bytes != num_bytes) {
    throw std::invalid_argument(
        name + " takes " + std::to_string(target.destination.num_bytes) +
        " bytes, but its gradient has " + std::to_string(num_bytes));
  }
  if (target.progress != GradientSink::Progress::kEmpty) {
    throw std::logic_error(name +
                           " was delivered again before the host took it");
  }
  target.progress = GradientSink::Progress::kFilling;
  ++(copier == Copier::kHost ? sink.num_host_copies_ : sink.num_device_copies_);
  delivery.route_ = entry.route;
  delivery.shard_ = entry.shard;
  delivery.place_ = index;
  delivery.copier_ = copier;
  delivery.data_ = target.destination.data;
  return delivery;
}

void Delivery::Finish() { End(true); }

void Delivery::Cancel() { End(false); }

void Delivery::End(bool delivered) {
  GradientSink& sink = *sink_;
  const std::lock_guard<std::mutex> lock(sink.mutex_);
  sink.routes_[route_][shard_].places[place_].progress =
      delivered ? GradientSink::Progress::kFull
                : GradientSink::Progress::kEmpty;
  --(copier_ == Copier::kHost ? sink.num_host_copies_
                              : sink.num_device_copies_);
  sink.changed_.notify_all();
}

}  // namespace sojax
