/* A wall clock that a test moves. LD_PRELOAD adds the nanoseconds of the file COVENANT_TEST_CLOCK to every reading of
 * the wall clock of one process and of its children. Monotonic clocks, the kernel's own times (file times, timers) and
 * programs without libc (runsc) keep the machine's clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_ns;
static int (*kernel_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_clock(void) {
    kernel_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("COVENANT_TEST_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    void *made = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (made != MAP_FAILED)
        offset_ns = made;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (kernel_gettime == NULL)
        open_clock();
    int status = kernel_gettime(clock, now);
    if (status != 0 || offset_ns == NULL || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return status;
    int64_t moved = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + *offset_ns;
    now->tv_sec = moved / 1000000000;
    now->tv_nsec = moved % 1000000000;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return status;
}

time_t time(time_t *into) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (into != NULL)
        *into = precise.tv_sec;
    return precise.tv_sec;
}
