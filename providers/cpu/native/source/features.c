/* What the library was built for. */
#include "outrider.h"

/* The instruction set that the compiler was allowed to use. */
EXPORT const char *or_target(void)
{
#if defined(__AVX2__) && defined(__FMA__)
    return "x86-64-v3";
#else
    return "portable";
#endif
}
