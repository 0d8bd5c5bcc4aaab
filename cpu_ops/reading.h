// Segments and scalars as Python hands them over. Call with the GIL.
#ifndef CPU_OPS_READING_H_
#define CPU_OPS_READING_H_

#include <pybind11/pybind11.h>

#include <vector>

#include "adam.h"
#include "arguments.h"
#include "segments.h"
#include "zero.h"

namespace sojax {

// Each reads all segments, tuples of arrays in the order of the Python class
// that they come from, and throws a Python exception for one that cannot be
// used. Overlap is for the caller to check.
std::vector<AdamSegment> ReadAdamSegments(const pybind11::iterable& items,
                                          ArrayReader& reader);
std::vector<AccumulateSegment> ReadAccumulateSegments(
    const pybind11::iterable& items, ArrayReader& reader);
std::vector<SquaresSegment> ReadSquaresSegments(const pybind11::iterable& items,
                                                ArrayReader& reader);
std::vector<NarrowSegment> ReadNarrowSegments(const pybind11::iterable& items,
                                              ArrayReader& reader);
std::vector<ZeroSegment> ReadZeroSegments(const pybind11::iterable& items,
                                          ArrayReader& reader);

// Returns the scalars of a step. Takes doubles and rounds them here, since the
// caller may be in a mode where a small one would be rounded to zero.
AdamParams MakeParams(double b1, double b2, double one_minus_b1,
                      double one_minus_b2, double k, double r, double s,
                      double d, double eps, double grad_scale);

// Returns a scalar rounded as MakeParams does.
float RoundScalar(double x);

}  // namespace sojax

#endif  // CPU_OPS_READING_H_
