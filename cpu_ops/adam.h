// The AdamW step on the CPU: its parameters and its buffers.
#ifndef CPU_OPS_ADAM_H_
#define CPU_OPS_ADAM_H_

#include <cstddef>

namespace sojax {

// Scalars of one step, each rounded once from double to float by the caller,
// where t is the number of the step, counted from 1.
struct AdamParams {
  float b1;            // decay of mu
  float b2;            // decay of nu
  float one_minus_b1;  // 1 - b1, from the unrounded b1
  float one_minus_b2;  // 1 - b2
  float k;             // 1 / sqrt(1 - b2^t)
  float r;             // eps_root * (1 - b2^t)
  float s;             // -lr / (1 - b1^t)
  float d;             // -lr * weight_decay
  float eps;
  float grad_scale;  // multiplies every gradient before anything else
};

// One flat run of parameters. The arrays must not overlap, and may start at
// any byte address.
struct AdamBuffers {
  float* p;          // master weights, updated in place
  float* mu;         // first moments, updated in place
  float* nu;         // second moments, updated in place
  const void* grad;  // elements of the instance's GradType
  void* weight;      // elements of the instance's WeightType; written only
};

// Updates n elements:
//     g  = grad * grad_scale
//     mu = fma(mu, b1, one_minus_b1 * g)
//     nu = fma(nu, b2, one_minus_b2 * (g * g))
//     p  = p + fma(p, d, mu / fma(sqrt(nu + r), k, eps) * s)
// with every operation rounded to float on its own and denormals kept. The
// bits depend on nothing but the inputs: not on the instruction set, on where
// a run is cut, or on alignment (NaN payloads excepted). The floating-point
// environment of the calling thread is left as it was found.
using AdamStepFn = void (*)(const AdamParams& params,
                            const AdamBuffers& buffers, std::size_t n);

}  // namespace sojax

#endif  // CPU_OPS_ADAM_H_
