// Functions that must become part of their caller, whatever they cost there.
#ifndef CPU_OPS_INLINE_H_
#define CPU_OPS_INLINE_H_

#define SOJAX_INLINE inline __attribute__((always_inline))

#endif  // CPU_OPS_INLINE_H_
