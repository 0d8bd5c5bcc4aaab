// Races and lifetimes of a gradient sink, without XLA and without Python: with
// TSan and ASan. Prints the first fault and returns 1.
#include "../gradient_sink.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

namespace sojax {
namespace {

constexpr std::size_t kNumPlaces = 3;
constexpr std::size_t kNumBytes = 64;
using Bytes = std::vector<unsigned char>;

// A sink with one route of two shards, and all memory that belongs to it.
struct Fixture {
  Fixture() : memory(2 * kNumPlaces, Bytes(kNumBytes)) {
    std::vector<ShardRoute> shards(2);
    for (std::size_t i = 0; i < memory.size(); ++i) {
      shards[i / kNumPlaces].address = &addresses[i / kNumPlaces];
      shards[i / kNumPlaces].destinations.push_back(
          {memory[i].data(), kNumBytes});
    }
    route = sink->AddRoute(shards);
  }

  ~Fixture() { sink->Close(); }

  // Delivers a block of equal bytes.
  void Deliver(std::size_t shard, std::size_t place, unsigned char value) {
    Delivery delivery =
        Delivery::Begin(&addresses[shard], static_cast<std::int64_t>(place),
                        kNumBytes, Delivery::Copier::kHost);
    std::memset(delivery.data(), value, kNumBytes);
    delivery.Finish();
  }

  std::shared_ptr<GradientSink> sink = std::make_shared<GradientSink>();
  int addresses[2] = {};
  std::vector<Bytes> memory;
  std::size_t route = 0;
};

template <class Error, class Function>
bool Throws(const Function& function) {
  try {
    function();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// Each shard's thread delivers a round as soon as the one before was taken.
void TestManyRounds() {
  constexpr unsigned kNumRounds = 500;
  Fixture fixture;
  std::atomic<unsigned> num_taken{0};
  std::mutex mutex;
  std::condition_variable taken;
  const auto deliver_all = [&](std::size_t shard) {
    for (unsigned round = 0; round < kNumRounds; ++round) {
      {
        std::unique_lock<std::mutex> lock(mutex);
        taken.wait(lock, [&] { return num_taken >= round; });
      }
      for (std::size_t place = kNumPlaces; place-- > 0;) {
        fixture.Deliver(shard, place, static_cast<unsigned char>(round));
      }
    }
  };
  std::thread first(deliver_all, 0);
  std::thread second(deliver_all, 1);
  for (unsigned round = 0; round < kNumRounds; ++round) {
    for (const std::vector<std::size_t>& places :
         {std::vector<std::size_t>{2}, std::vector<std::size_t>{0, 1}}) {
      CHECK(fixture.sink->Wait(fixture.route, places, round) ==
            WaitResult::kDelivered);
    }
    for (const Bytes& block : fixture.memory) {
      CHECK(block == Bytes(kNumBytes, static_cast<unsigned char>(round)));
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ++num_taken;
    }
    taken.notify_all();
  }
  first.join();
  second.join();
}

void TestInterruptEndsLaterTicketsOnly() {
  Fixture fixture;
  std::thread later([&] {
    CHECK(fixture.sink->Wait(fixture.route, {0}, 5) ==
          WaitResult::kInterrupted);
  });
  std::thread earlier([&] {
    CHECK(fixture.sink->Wait(fixture.route, {1}, 4) == WaitResult::kDelivered);
  });
  fixture.sink->Interrupt(5);
  later.join();
  fixture.sink->Interrupt(6);  // does not take the first one back
  CHECK(fixture.sink->Wait(fixture.route, {0}, 5) == WaitResult::kInterrupted);
  for (std::size_t shard : {0u, 1u}) fixture.Deliver(shard, 1, 7);
  earlier.join();
}

void TestResetForgetsWhatNobodyTook() {
  Fixture fixture;
  fixture.Deliver(0, 0, 1);
  CHECK(Throws<std::logic_error>([&] { fixture.Deliver(0, 0, 2); }));
  fixture.sink->Interrupt(0);
  fixture.sink->Reset();
  fixture.Deliver(0, 0, 3);
  fixture.Deliver(1, 0, 3);
  CHECK(fixture.sink->Wait(fixture.route, {0}, 9) == WaitResult::kDelivered);
}

void TestCancelledDeliveryMayComeAgain() {
  Fixture fixture;
  Delivery::Begin(&fixture.addresses[0], 0, kNumBytes,
                  Delivery::Copier::kDevice)
      .Cancel();
  fixture.Deliver(0, 0, 1);
  CHECK(fixture.sink->Close() == 0);
}

// The destinations are freed right after Close.
void TestCloseWaitsForTheHostsCopy() {
  auto fixture = std::make_unique<Fixture>();
  std::atomic<bool> begun{false};
  std::atomic<bool> finished{false};
  std::thread copier([&, address = &fixture->addresses[0]] {
    Delivery delivery =
        Delivery::Begin(address, 0, kNumBytes, Delivery::Copier::kHost);
    begun = true;
    std::this_thread::yield();
    std::memset(delivery.data(), 1, kNumBytes);
    finished = true;
    delivery.Finish();
  });
  while (!begun) std::this_thread::yield();
  CHECK(fixture->sink->Close() == 0);
  CHECK(finished);
  fixture.reset();
  copier.join();
}

// A device may say that its copy has ended after the sink is gone.
void TestDeviceCopyOutlivesItsSink() {
  auto fixture = std::make_unique<Fixture>();
  Delivery delivery = Delivery::Begin(&fixture->addresses[1], 2, kNumBytes,
                                      Delivery::Copier::kDevice);
  CHECK(fixture->sink->Close() == 1);
  fixture.reset();
  delivery.Finish();
}

void TestCloseEndsWaitsAndRoutes() {
  Fixture fixture;
  std::thread waiter([&] {
    CHECK(fixture.sink->Wait(fixture.route, {0}, 0) == WaitResult::kClosed);
  });
  fixture.sink->Close();
  waiter.join();
  CHECK(Throws<std::invalid_argument>([&] { fixture.Deliver(0, 0, 1); }));
  CHECK(Throws<std::logic_error>([&] { fixture.sink->AddRoute({}); }));
}

void TestAnAddressHasOneRoute() {
  Fixture fixture;
  int other = 0;
  const auto second = std::make_shared<GradientSink>();
  const std::vector<ShardRoute> taken = {{&other, {}},
                                         {&fixture.addresses[0], {}}};
  CHECK(Throws<std::invalid_argument>([&] { second->AddRoute(taken); }));
  second->AddRoute({{&other, {}}});  // the failure has left nothing behind
  fixture.sink->Close();
  second->AddRoute({{&fixture.addresses[0], {}}});
  second->Close();
}

}  // namespace
}  // namespace sojax

int main() {
  sojax::TestManyRounds();
  sojax::TestInterruptEndsLaterTicketsOnly();
  sojax::TestResetForgetsWhatNobodyTook();
  sojax::TestCancelledDeliveryMayComeAgain();
  sojax::TestCloseWaitsForTheHostsCopy();
  sojax::TestDeviceCopyOutlivesItsSink();
  sojax::TestCloseEndsWaitsAndRoutes();
  sojax::TestAnAddressHasOneRoute();
  return 0;
}
