#include "reading.h"

#include "fp_mode.h"

namespace py = pybind11;

namespace sojax {
namespace {

float Rounded(double x) { return static_cast<float>(x); }

}  // namespace

std::vector<AdamSegment> ReadAdamSegments(const py::iterable& items,
                                          ArrayReader& reader) {
  std::vector<AdamSegment> segments;
  for (const py::handle& item : items) {
    const py::tuple fields = reader.NextSegment(item, 8);
    AdamSegment segment{};
    AdamBuffers& b = segment.buffers;
    Layout layout{};
    b.p = reader.Master(fields[0], "p_inout", fields[1], "p_low_inout",
                        &b.p_low, &layout.master);
    b.mu = reader.Floats(fields[2], "mu_inout");
    b.nu = reader.Floats(fields[3], "nu_inout");
    b.grad = reader.Grad(fields[4], "grad", &layout.grad);
    b.weight = reader.Weight(fields[5], "weight_out", &layout.weight);
    b.sum = reader.OptionalFloats(fields[6], "sum");
    b.sumsq = reader.ChunkSums(fields[7], "sumsq_out");
    segment.num_elems = reader.num_elems();
    segment.layout = reader.LayoutIndex(layout);
    segments.push_back(segment);
  }
  return segments;
}

std::vector<AccumulateSegment> ReadAccumulateSegments(const py::iterable& items,
                                                      ArrayReader& reader) {
  std::vector<AccumulateSegment> segments;
  for (const py::handle& item : items) {
    const py::tuple fields = reader.NextSegment(item, 3);
    AccumulateSegment segment{};
    segment.buffers.sum = reader.Floats(fields[0], "sum_inout");
    segment.buffers.grad = reader.Grad(fields[1], "grad", &segment.grad_type);
    segment.buffers.sumsq = reader.ChunkSums(fields[2], "sumsq_out");
    segment.num_elems = reader.num_elems();
    segments.push_back(segment);
  }
  return segments;
}

std::vector<SquaresSegment> ReadSquaresSegments(const py::iterable& items,
                                                ArrayReader& reader) {
  std::vector<SquaresSegment> segments;
  for (const py::handle& item : items) {
    const py::tuple fields = reader.NextSegment(item, 3);
    SquaresSegment segment{};
    segment.buffers.grad = reader.Grad(fields[0], "grad", &segment.grad_type);
    segment.buffers.sum = reader.OptionalFloats(fields[1], "sum");
    reader.Require(fields[2], "sumsq_out");
    segment.buffers.sumsq = reader.ChunkSums(fields[2], "sumsq_out");
    segment.num_elems = reader.num_elems();
    segments.push_back(segment);
  }
  return segments;
}

std::vector<NarrowSegment> ReadNarrowSegments(const py::iterable& items,
                                              ArrayReader& reader) {
  std::vector<NarrowSegment> segments;
  for (const py::handle& item : items) {
    const py::tuple fields = reader.NextSegment(item, 2);
    NarrowSegment segment{};
    segment.p = reader.ConstFloats(fields[0], "p");
    reader.Require(fields[1], "weight_out");
    segment.weight =
        reader.Weight(fields[1], "weight_out", &segment.weight_type);
    segment.num_elems = reader.num_elems();
    segments.push_back(segment);
  }
  return segments;
}

std::vector<ZeroSegment> ReadZeroSegments(const py::iterable& items,
                                          ArrayReader& reader) {
  std::vector<ZeroSegment> segments;
  for (const py::handle& item : items) {
    const py::tuple fields = reader.NextSegment(item, 1);
    ZeroSegment segment{};
    segment.start = reader.Bytes(fields[0], "array_out", &segment.num_bytes);
    segments.push_back(segment);
  }
  return segments;
}

float RoundScalar(double x) {
  const ScopedDefaultFpMode fp_mode;
  float (*volatile round)(double) = &Rounded;  // not moved out of the scope
  return round(x);
}

AdamParams MakeParams(double b1, double b2, double one_minus_b1,
                      double one_minus_b2, double k, double r, double s,
                      double d, double eps, double grad_scale) {
  return {RoundScalar(b1),
          RoundScalar(b2),
          RoundScalar(one_minus_b1),
          RoundScalar(one_minus_b2),
          RoundScalar(k),
          RoundScalar(r),
          RoundScalar(s),
          RoundScalar(d),
          RoundScalar(eps),
          RoundScalar(grad_scale)};
}

}  // namespace sojax
