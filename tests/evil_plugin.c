/* Execution provider plugins that do harm, as ONNX Runtime loads them.

   cc -shared -fPIC -O1 -DFAULT=SEGFAULT -o evil.so evil_plugin.c [-l:libstdc++.so.6]

   When it is registered:
   SEGFAULT  it reads through a null pointer
   ABORT     it calls abort()
   EXIT      it calls exit(7)
   QUIT      it calls exit(0), as if all were well
   KILL      it sends SIGKILL to its own process
   THROW     it lets a C++ exception out, an int
   HANG      it waits for ever
   SPIN      it computes for ever
   REFUSE    it returns an error, as it should
   EMPTY     it has no execution provider
   When it is loaded, before any of its functions is called:
   LOADING   it reads through a null pointer
   NOTHING   it has none of the functions that ONNX Runtime looks for
   As a library of custom operators:
   OPERATORS it reads through a null pointer when they are registered
*/

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define SEGFAULT 1
#define ABORT 2
#define EXIT 3
#define QUIT 4
#define KILL 5
#define THROW 6
#define HANG 7
#define SPIN 8
#define REFUSE 9
#define LOADING 10
#define NOTHING 11
#define EMPTY 12
#define OPERATORS 13

#if FAULT == SEGFAULT || FAULT == LOADING || FAULT == OPERATORS
static int *volatile device; /* NULL, but the compiler cannot know */
static volatile int last;
static void crash(void) { last = *device; }
#endif

#if FAULT == LOADING
__attribute__((constructor)) static void loading(void) { crash(); }
#endif

#if FAULT == THROW
extern void *_ZTIi; /* typeid(int) */
void *__cxa_allocate_exception(size_t size);
void __cxa_throw(void *thrown, void *type, void (*destroy)(void *));
#endif

#if FAULT == NOTHING

int something_else(void) { return 0; }

#elif FAULT == OPERATORS

void *RegisterCustomOps(void *options, const void *base)
{
    (void)options, (void)base;
    crash();
    return NULL;
}

#else

/* The start of ONNX Runtime's C interface: CreateStatus is the first of its functions. */
typedef struct {
    const void **(*GetApi)(uint32_t version);
    const char *(*GetVersionString)(void);
} OrtApiBase;
typedef void *(*CreateStatus)(int code, const char *message);

void *CreateEpFactories(const char *name, const OrtApiBase *base, const void *logger, void **factories, size_t room,
                        size_t *count)
{
    (void)name, (void)base, (void)logger, (void)factories, (void)room;
    *count = 0;
#if FAULT == SEGFAULT
    crash();
#elif FAULT == ABORT
    abort();
#elif FAULT == EXIT
    exit(7);
#elif FAULT == QUIT
    exit(0);
#elif FAULT == KILL
    kill(getpid(), SIGKILL);
#elif FAULT == THROW
    int *thrown = __cxa_allocate_exception(sizeof(int));
    *thrown = 7;
    __cxa_throw(thrown, &_ZTIi, NULL);
#elif FAULT == HANG
    for (;;)
        pause();
#elif FAULT == SPIN
    for (volatile uint64_t spent = 0;; spent++)
        ;
#elif FAULT == REFUSE
    return ((CreateStatus)(uintptr_t)base->GetApi(22)[0])(1, "no device of this vendor is here");
#endif
    return NULL;
}

void *ReleaseEpFactory(void *factory)
{
    (void)factory;
    return NULL;
}

#endif
