/* Many jobs of few tasks through the pool, started and stopped again and again; run by test_native_pool.py.
 *
 * Arguments: threads, rounds, nanoseconds that a helper looks for work. Each task adds its number + 1 to a place of its
 * own, so one that is done twice, or never, shows. Exit code 1 and a line say what was wrong.
 */
#include "outrider.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define JOBS 64
#define TASKS 9
#define RUNS 100

struct work { int64_t *places; int64_t pause; };
struct step { void (*run)(const void *, int64_t, int64_t); const void *args; int64_t tasks; };

void or_run(const struct step *, int64_t);
int64_t or_start(int64_t, int64_t);
void or_stop(void);

static void add(const void *args, int64_t task, int64_t thread)
{
    const struct work *work = args;
    (void)thread;
    for (volatile int64_t i = 0; i < work->pause; i++)
        ;
    work->places[task] += task + 1;
}

static int round_of(int64_t threads, int64_t spin)
{
    int64_t places[JOBS][TASKS] = {0}, times[JOBS] = {0};
    struct work works[JOBS];
    struct step steps[JOBS];
    if (or_start(threads, spin) != threads)
        return printf("%ld threads could not be started\n", (long)threads);
    for (int job = 0; job < JOBS; job++) {
        works[job] = (struct work){places[job], rand() % 200};
        steps[job] = (struct step){add, &works[job], 1 + rand() % TASKS};
    }
    for (int run = 0; run < RUNS; run++) {
        int n = 1 + rand() % JOBS;
        or_run(steps, n);
        for (int job = 0; job < n; job++)
            times[job]++;
        if (rand() % 20 == 0)
            usleep(rand() % 600); /* helpers fall asleep, or just do not */
    }
    for (int job = 0; job < JOBS; job++)
        for (int64_t task = 0; task < steps[job].tasks; task++)
            if (places[job][task] != times[job] * (task + 1))
                return printf("task %ld of job %d gave %ld in %ld runs\n", (long)task, job, (long)places[job][task],
                              (long)times[job]);
    if (rand() % 3 == 0)
        or_stop();
    return 0;
}

int main(int count, char **words)
{
    if (count != 4)
        return 2;
    for (int64_t round = atol(words[2]); round > 0; round--)
        if (round_of(atol(words[1]), atol(words[3])))
            return 1;
    or_stop();
    return 0;
}
