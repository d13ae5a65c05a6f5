/* The one thread pool of the process, and the entry through which Python runs steps.
 *
 * The calling thread works too. A job is published by one word, the ticket:
 *
 *      bits 63..32: job number | 31..16: tasks | 15..0: next task
 *
 * Whoever moves `next` by one, caller or helper, owns that task; as the number and the counts change in one store, a
 * helper that was late can take nothing of a job that is not the present one. The caller does not wait for a helper
 * that took no task, only until `finished` tasks are all of them; only then may `present` change. Helpers look at the
 * ticket for a while, then sleep in the kernel on `bell`, which the caller rings only if one sleeps. In a fork, where no
 * helper is, the caller does all tasks. One thread at a time may call or_run.
 */
#define _GNU_SOURCE
#include "outrider.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void (*kernel)(const void *, int64_t, int64_t);

struct step {
    kernel run;
    const void *args;
    int64_t tasks; /* 1 .. 65535 */
};

#define MOST_HELPERS 255
#define STACK (512 << 10) /* bytes; kernels keep large things elsewhere, and a worker's memory may be bounded */

static struct {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic int64_t finished;
    _Alignas(64) const struct step *present;
    _Alignas(64) _Atomic uint32_t bell;
    _Atomic int32_t sleeping;
    _Atomic int32_t stopping;
    _Atomic int64_t spin;
    int64_t helpers;
    pid_t process; /* whose threads the helpers are; a fork has none */
    pthread_t threads[MOST_HELPERS];
} pool;

INLINE void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Take tasks of the present job until none is left. */
static void take(int64_t thread)
{
    uint64_t ticket = atomic_load(&pool.ticket);
    for (;;) {
        uint64_t next = ticket & 0xffff, tasks = ticket >> 16 & 0xffff;
        if (next >= tasks)
            return;
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1))
            continue;
        const struct step *step = pool.present; /* stays, as this task has not finished */
        step->run(step->args, (int64_t)next, thread);
        atomic_fetch_add(&pool.finished, 1);
        ticket = atomic_load(&pool.ticket);
    }
}

static int waiting(void)
{
    uint64_t ticket = atomic_load(&pool.ticket);
    return (ticket & 0xffff) < (ticket >> 16 & 0xffff) || atomic_load(&pool.stopping);
}

static void *help(void *number)
{
    int64_t thread = (int64_t)(intptr_t)number;
    while (!atomic_load(&pool.stopping)) {
        int64_t end = now() + atomic_load(&pool.spin);
        int found = 0;
        while (!(found = waiting())) {
            for (int i = 0; i < 32 && !(found = waiting()); i++)
                relax();
            if (found || now() > end)
                break;
        }
        if (!found) {
            uint32_t seen = atomic_load(&pool.bell);
            atomic_fetch_add(&pool.sleeping, 1);
            if (!waiting())
                syscall(SYS_futex, &pool.bell, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            atomic_fetch_sub(&pool.sleeping, 1);
        }
        take(thread);
    }
    return NULL;
}

static void ring(void)
{
    if (atomic_load(&pool.sleeping)) {
        atomic_fetch_add(&pool.bell, 1);
        syscall(SYS_futex, &pool.bell, FUTEX_WAKE_PRIVATE, MOST_HELPERS, NULL, NULL, 0);
    }
}

/* Run n steps, one after the other. */
EXPORT void or_run(const struct step *steps, int64_t n)
{
    for (const struct step *step = steps; step < steps + n; step++) {
        if (step->tasks == 1 || !pool.helpers) {
            for (int64_t task = 0; task < step->tasks; task++)
                step->run(step->args, task, 0);
            continue;
        }
        pool.present = step;
        atomic_store(&pool.finished, 0);
        uint64_t job = (atomic_load(&pool.ticket) >> 32) + 1;
        atomic_store(&pool.ticket, job << 32 | (uint64_t)step->tasks << 16);
        ring();
        take(0);
        for (int64_t i = 0; atomic_load(&pool.finished) != step->tasks; i++)
            if (i < 4096)
                relax();
            else
                sched_yield(); /* the helper that has the last task was preempted, perhaps by us */
    }
}

/* Start helpers so that `threads` work in all, the caller included; spin: nanoseconds a helper looks for work before
 * it sleeps. Returns the threads there are, fewer where the system refuses. To be called while no or_run is. */
EXPORT int64_t or_start(int64_t threads, int64_t spin)
{
    sigset_t all, old;
    pthread_attr_t attributes;
    if (pool.process != getpid())
        pool.helpers = 0;
    pool.process = getpid();
    atomic_store(&pool.spin, spin);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals are the main thread's business */
    while (pool.helpers < threads - 1 && pool.helpers < MOST_HELPERS) {
        pthread_t *place = &pool.threads[pool.helpers];
        if (pthread_create(place, &attributes, help, (void *)(intptr_t)(pool.helpers + 1)))
            break;
        pool.helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
    return pool.helpers + 1;
}

/* End the helpers; in a fork, which has none, forget them. */
EXPORT void or_stop(void)
{
    if (pool.process == getpid()) {
        atomic_store(&pool.stopping, 1);
        atomic_fetch_add(&pool.bell, 1);
        syscall(SYS_futex, &pool.bell, FUTEX_WAKE_PRIVATE, MOST_HELPERS, NULL, NULL, 0);
        for (int64_t i = 0; i < pool.helpers; i++)
            pthread_join(pool.threads[i], NULL);
        atomic_store(&pool.stopping, 0);
    }
    pool.helpers = 0;
}
