/*
 * covenant-start: take the place that a caller has prepared, step by step, and execute a program there.
 *
 *     covenant-start VERSION PARENT REPORT STEP... execute PROGRAM ARGUMENT...
 *
 * sandbox/kernel/proc/launcher.py writes these words and starts this by posix_spawn(3). It does what a child forked from
 * Python did, and is a program of its own because that fork copied, and then faulted in, an interpreter's memory for a
 * dozen system calls. It holds no right that its caller has not, opens nothing but what it is told, and has no option.
 *
 * PARENT is the caller's process, REPORT the descriptor on which a failed step is told, as "[STEP, ERRNO]" with steps
 * counted from 0; it is closed by execve. STEP is one of
 *
 *     join FILE          write itself into this cgroup.procs or tasks
 *     die                be killed when the caller's thread ends; do nothing where that has happened already
 *     network FD         enter this network namespace
 *     isolate            enter a new network namespace, with a loopback that is down
 *     private            a mount namespace of its own, of which nothing reaches any other
 *     cover DIRECTORY    an empty tmpfs, read-only, over this directory
 *     attach FD TARGET   move a detached mount there
 *     directory PATH     chdir
 *     keep FD            the program is given this descriptor too; of the others above 2 it is given none
 *     filter PROGRAM     be under this seccomp filter: its struct sock_filter in hexadecimal digits, 16 for each
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define VERSION "2"
#define KEPT_MAX 64
#define FILTER_MAX 64
#define FAILED 127
#define SIGSET_BYTES 8

/* asm-generic/unistd.h and include/uapi/linux: the same on every architecture, and newer than some headers. */
#define NR_MOVE_MOUNT 429
#define NR_CLOSE_RANGE 436
#define MOVE_FROM_EMPTY_PATH 0x04
#define CLOSE_AT_EXEC 4

static pid_t parent;
static int kept[KEPT_MAX];
static int kept_count;

/* A number as Python writes one; -1 and EINVAL for anything else. */
static int number(const char *word)
{
    char *end;
    errno = 0;
    long value = strtol(word, &end, 10);
    if (errno != 0 || end == word || *end != '\0' || value < 0 || value > 0x7fffffff) {
        errno = EINVAL;
        return -1;
    }
    return (int)value;
}

static int join(char **word)
{
    int fd = open(word[0], O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -1;
    if (write(fd, "0", 1) != 1)
        return -1;
    return close(fd);
}

static int die(char **word)
{
    (void)word;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        return -1;
    if (getppid() != parent)
        _exit(FAILED); /* It died before the line above, which then waits for another's death. */
    umask(077);
    return 0;
}

static int network(char **word)
{
    int fd = number(word[0]);
    return fd < 0 ? -1 : setns(fd, CLONE_NEWNET);
}

static int isolate(char **word)
{
    (void)word;
    return unshare(CLONE_NEWNET);
}

static int private(char **word)
{
    (void)word;
    if (unshare(CLONE_NEWNS) != 0)
        return -1;
    return mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL);
}

static int cover(char **word)
{
    return mount("none", word[0], "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

static int attach(char **word)
{
    int fd = number(word[0]);
    if (fd < 0)
        return -1;
    return (int)syscall(NR_MOVE_MOUNT, fd, "", AT_FDCWD, word[1], MOVE_FROM_EMPTY_PATH);
}

static int directory(char **word)
{
    return chdir(word[0]);
}

static int keep(char **word)
{
    int fd = number(word[0]);
    if (fd < 0)
        return -1;
    if (kept_count == KEPT_MAX) {
        errno = E2BIG;
        return -1;
    }
    kept[kept_count++] = fd;
    return 0;
}

/* The value of two hexadecimal digits as Python writes them; -1 for anything else. */
static int byte(const char *two)
{
    static const char digits[] = "0123456789abcdef";
    const char *high = strchr(digits, two[0]), *low = strchr(digits, two[1]);
    return high == NULL || low == NULL ? -1 : (int)((high - digits) << 4 | (low - digits));
}

static int filter(char **word)
{
    static struct sock_filter program[FILTER_MAX];
    size_t length = strlen(word[0]) / 2;
    if (length == 0 || length > sizeof program || strlen(word[0]) % (2 * sizeof *program) != 0) {
        errno = EINVAL;
        return -1;
    }
    for (size_t i = 0; i < length; i++) {
        int value = byte(word[0] + 2 * i);
        if (value < 0) {
            errno = EINVAL;
            return -1;
        }
        ((unsigned char *)program)[i] = (unsigned char)value;
    }
    struct sock_fprog whole = {(unsigned short)(length / sizeof *program), program};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &whole);
}

/* Close-on-exec is a habit; a descriptor that somebody forgot must not become the sandbox's. */
static int execute(char **word)
{
    if (syscall(NR_CLOSE_RANGE, 3U, ~0U, CLOSE_AT_EXEC) != 0)
        return -1;
    for (int i = 0; i < kept_count; i++)
        if (fcntl(kept[i], F_SETFD, 0) != 0)
            return -1;
    return execv(word[0], word + 1);
}

static const struct step {
    const char *name;
    int words;
    int (*take)(char **word);
} steps[] = {
    {"join", 1, join},       {"die", 0, die},     {"network", 1, network},     {"isolate", 0, isolate},
    {"private", 0, private}, {"cover", 1, cover}, {"attach", 2, attach},       {"directory", 1, directory},
    {"keep", 1, keep},       {"filter", 1, filter}, {"execute", 2, execute},
};

static const struct step *find(const char *name)
{
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (strcmp(steps[i].name, name) == 0)
            return &steps[i];
    return NULL;
}

/* glibc's own two, which its posix_spawn(3) hands on ignored and its sigaction(3) does not touch. */
static void reset_internal_signals(void)
{
    static const unsigned long as_new[8]; /* A struct sigaction of the kernel's, on any architecture. */
    for (int number = 32; number <= 33; number++)
        syscall(SYS_rt_sigaction, number, as_new, NULL, SIGSET_BYTES);
}

static void fail(int report, int step)
{
    char text[64];
    int length = snprintf(text, sizeof text, "[%d, %d]", step, errno);
    if (write(report, text, (size_t)length) != length) {
        /* Whoever would read it is gone. */
    }
    _exit(FAILED);
}

int main(int count, char **words)
{
    int report = count < 5 ? -1 : number(words[3]);
    if (report < 3)
        return FAILED;
    parent = number(words[2]);
    if (parent < 1 || strcmp(words[1], VERSION) != 0) {
        errno = EPROTO;
        fail(report, -1);
    }
    reset_internal_signals();
    int at = 4;
    for (int taken = 0; at < count; taken++) {
        const struct step *step = find(words[at]);
        if (step == NULL || count - at - 1 < step->words) {
            errno = EPROTO;
            fail(report, taken);
        }
        if (step->take(words + at + 1) != 0)
            fail(report, taken);
        at += 1 + step->words;
    }
    return FAILED;
}
