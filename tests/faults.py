"""Faults of the kernels that tests have to notice; see mutations.py."""

import dataclasses

_ROLLBACK = ("tests/test_rollback.py", "tests/test_record.py")
_FUSED = ("tests/test_kernel_fused.py",)
_QUEUE = ("tests/test_kernel_queue.py",)
_ZERO = ("tests/test_kernel_zero.py",)
_CALLS = ("tests/test_kernel_calls.py",)
_ARGUMENTS = ("tests/test_kernel_arguments.py",)
_DRIFT = ("tests/test_kernel_drift.py",)
_CONTRACTION_OFF = "-ffp-contract=off"
FLAG = ""


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One fault and the tests that have to notice it.

  Attributes:
    name: what to call it.
    file: of cpu_ops/; FLAG if a compiler flag changes.
    old: what stands there, once.
    new: what stands there instead.
    tests: arguments of pytest.
  """

  name: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...] = _ROLLBACK


MUTATIONS = [
  # Those that any record of this kind has to be safe from.
  Mutation(
    "byte-limit-off-by-one",
    "codes-inl.h",
    "kLimit = 127;",
    "kLimit = 128;",
  ),
  Mutation(
    "nibble-limit-off-by-one", "codes-inl.h", "kLimit = 7;", "kLimit = 8;"
  ),
  Mutation(
    "escape-limit-of-the-record-only",
    "record-inl.h",
    "code < -limit || code > limit",
    "code < -limit || code > limit + 1",
  ),
  Mutation(
    "escapes-in-another-order",
    "record-inl.h",
    "for (std::size_t array = 0; array < 3; ++array) {",
    "for (std::size_t array = 2; array < 3; --array) {",
  ),
  Mutation(
    "flush-to-zero-on-x86",
    "fp_mode.h",
    "kDefaultFpMode = 0x1f80;",
    "kDefaultFpMode = 0x9fc0;",
  ),
  Mutation(
    "flush-to-zero-on-arm",
    "fp_mode.h",
    "kDefaultFpMode = 0;",
    "kDefaultFpMode = FpWord{1} << 24;",
  ),
  Mutation("contraction", FLAG, _CONTRACTION_OFF, "-ffp-contract=fast"),
  # Others of the record and of what takes it back.
  Mutation(
    "nothing-gates-nu",
    "record-inl.h",
    "V::IsBeyond(nu_code, Group::Nu::kLimit)",
    "V::IsBeyond(mu_code, Group::Nu::kLimit)",
  ),
  Mutation(
    "codes-past-the-end",
    "record-inl.h",
    "if (lane >= count) {",
    "if (lane > count) {",
  ),
  Mutation(
    "estimates-keep-nan",
    "vec_scalar.h",
    "return x < limit ? x : limit;",
    "return x > limit ? limit : x;",
  ),
  Mutation(
    "undo-scales-as-the-redo",
    "undo-inl.h",
    "const F g = pass.taken.ScaledGrad(grad);",
    "const F g = pass.again.ScaledGrad(grad);",
  ),
  Mutation(
    "undo-forgets-p-escapes",
    "undo-inl.h",
    "V::IsEqual(p_code, -Group::P::kLimit - 1)",
    "V::IsEqual(p_code, -Group::P::kLimit - 2)",
  ),
  Mutation(
    "undo-stores-split-masters-as-a-step",
    "elems-inl.h",
    "StoreBits<V>(b, i, p);",
    "StoreBits<V>(b, i, V::QuietNan(p));",
  ),
  Mutation(
    "nibbles-swapped-on-avx2",
    "vec_avx2.h",
    "BytesOfNibbles(a), _mm256_slli_epi64(BytesOfNibbles(b), 32)",
    "BytesOfNibbles(b), _mm256_slli_epi64(BytesOfNibbles(a), 32)",
  ),
  Mutation(
    "a-full-record-overruns",
    "rollback.cc",
    "count > record_.capacity - start",
    "count > record_.capacity - start + 1",
  ),
  Mutation(
    "chunks-left-out-stay-stepped",
    "rollback.cc",
    "  functions.undo[form_index](",
    "  if (count == SIZE_MAX) functions.undo[form_index](",
  ),
  Mutation(
    "redo-leaves-out",
    "rollback.cc",
    "StepChunk(kernels, new_params, segment, chunk);",
    "StepChunk(kernels, params, segment, chunk);",
  ),
  # Fused operations.
  Mutation(
    "squares-of-scaled-gradients",
    "adam-inl.h",
    "    squares.Add(j, grad);",
    "    squares.Add(j, formulas.ScaledGrad(grad));",
    _FUSED,
  ),
  Mutation(
    "squares-in-the-wrong-lane",
    "adam-inl.h",
    "UpdateVector<kStream>(formulas, b, squares, j++, i);",
    "UpdateVector<kStream>(formulas, b, squares, j, i);",
    _FUSED,
  ),
  Mutation(
    "split-nan-becomes-infinite",
    "elems-inl.h",
    "StoreBits<V>(b, i, V::QuietNan(p), count...);",
    "StoreBits<V>(b, i, p, count...);",
    _FUSED,
  ),
  # The formula.
  Mutation(
    "decay-by-a-rounded-factor",
    "formulas-inl.h",
    "V::Add(p, V::Fma(p, V::Set(c_.d), move));",
    "V::Fma(p, V::Set(1.0f + c_.d), move);",
    _DRIFT,
  ),
  # What Python hands over.
  Mutation(
    "read-only-arrays-are-written",
    "arguments.cc",
    "if (written && !array.writeable()) {",
    "if (written && array.size() == SIZE_MAX) {",
    _ARGUMENTS,
  ),
  Mutation(
    "records-overlap",
    "arguments.cc",
    "if (num_bytes != 0) {",
    "if (num_bytes != 0 && !in_record_) {",
    _CALLS,
  ),
  Mutation(
    "strides-are-ignored",
    "arguments.cc",
    "if ((array.flags() & py::array::c_style) == 0) {",
    "if (array.flags() == 0) {",
    _CALLS,
  ),
  Mutation(
    "lengths-may-differ",
    "arguments.cc",
    "if (static_cast<std::size_t>(array.size()) != num_elems_) {",
    "if (static_cast<std::size_t>(array.size()) < num_elems_) {",
    _CALLS,
  ),
  # The queue.
  Mutation(
    "jobs-that-share-arrays-overlap",
    "pool.cc",
    "return Conflict(earlier->extents_, job->extents_);",
    "return false;",
    _QUEUE,
  ),
  Mutation(
    "errors-are-dropped",
    "pool.cc",
    "if (!error_) error_ = std::current_exception();",
    "if (error_) error_ = std::current_exception();",
    _QUEUE,
  ),
  Mutation(
    "closing-drops-the-queue",
    "pool.cc",
    "if (job == nullptr) {",
    "if (closing_) return;\n    if (job == nullptr) {",
    _QUEUE,
  ),
  # Zeros.
  Mutation(
    "a-byte-of-a-piece-is-left",
    "zero.cc",
    "0, pieces[item].num_bytes);",
    "0, pieces[item].num_bytes - 1);",
    _ZERO,
  ),
  Mutation(
    "the-end-of-an-array-is-passed",
    "zero.cc",
    "std::min(kPieceBytes - into_page, segment.num_bytes - done);",
    "std::max(kPieceBytes - into_page, segment.num_bytes - done);",
    _ZERO,
  ),
]
