/* Included into wheels' libraries only (`-include`): takes the versions of the C library's functions that systems since
 * glibc 2.17 have, where the newest ones, which the linker would take, are the same or differ in setting errno. */
#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__)
#define OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
OLDEST(pthread_create);
OLDEST(pthread_join);
OLDEST(pthread_sigmask);
OLDEST(pthread_attr_setstacksize);
OLDEST(exp);
OLDEST(exp2);
OLDEST(log);
OLDEST(log2);
OLDEST(pow);
OLDEST(expf);
OLDEST(exp2f);
OLDEST(logf);
OLDEST(log2f);
OLDEST(powf);
#endif
