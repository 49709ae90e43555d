/*
 * probes: what a compiled agent can try with nothing between it and the kernel, by ../../probes.toml, package "binary".
 *
 * The protocol is that of ../../python/harness.py: one JSON line in, whose "text" is an id or "batch:ID,ID", one JSON
 * line out. Each probe runs in a child, so that what it does to its own process ends with it. A probe gives 0 when the
 * forbidden thing was done, and an errno when it was not.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LINE_BYTES = 65536, TEXT_BYTES = 32768, STARTED = 42, REFUSED = 78, ABOVE = 100, MEMORY = 512 << 20 };

static const char OWN[] = "/workspace/bin/probes";

/* --- the gate: hostile code starts under gVisor or not at all (../../python/gate.py says why these signs) ---------- */

static void require_gvisor(void)
{
    static const char *const landmarks[] = {"/proc/zoneinfo", "/proc/buddyinfo", "/proc/softirqs", "/proc/self/wchan"};
    struct utsname kernel;
    bool is_gvisor = uname(&kernel) == 0 && strcmp(kernel.version, "#1 SMP Sun Jan 10 15:06:54 PST 2016") == 0;
    char wanted[512], found[512] = "";
    FILE *file = fopen("/proc/version", "re");
    if (file == NULL || fgets(found, sizeof found, file) == NULL)
        is_gvisor = false;
    if (file != NULL)
        fclose(file);
    found[strcspn(found, "\n")] = '\0';
    snprintf(wanted, sizeof wanted, "Linux version %s %s", kernel.release, kernel.version);
    is_gvisor = is_gvisor && strcmp(found, wanted) == 0;
    for (size_t i = 0; i < sizeof landmarks / sizeof *landmarks; i++)
        is_gvisor = is_gvisor && access(landmarks[i], F_OK) != 0;
    if (!is_gvisor) {
        fputs("refused: this is hostile code and runs only under gVisor\n", stderr);
        exit(REFUSED);
    }
}

/* --- probes --------------------------------------------------------------------------------------------------------- */

static int failed(long result)
{
    return result < 0 ? errno : 0;
}

/* Of a start that succeeds nothing comes back: the new program ends with a status of its own. */
static char *const AGAIN[] = {"probes", "--started", NULL};

static int exec_itself(void)
{
    return failed(execve("/proc/self/exe", AGAIN, NULL));
}

static int exec_descriptor(void)
{
    int own = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (own < 0)
        return errno;
    return failed(syscall(SYS_execveat, own, "", AGAIN, NULL, AT_EMPTY_PATH));
}

static int memory_file(void)
{
    return failed(syscall(SYS_memfd_create, "probe", 0));
}

static int file_beside_itself(void)
{
    return failed(open("/workspace/bin/beside", O_WRONLY | O_CREAT | O_EXCL, 0700));
}

static int own_mode(void)
{
    return failed(chmod(OWN, 0777));
}

static int own_name(void)
{
    return failed(rename(OWN, "/workspace/bin/gone")) ? errno : failed(rename("/workspace/bin/gone", OWN));
}

static int interpreter(void)
{
    return failed(open("/usr/bin/python3", O_RDONLY));
}

static int libraries(void)
{
    return failed(open("/usr/lib", O_RDONLY | O_DIRECTORY));
}

static int traced(void)
{
    return failed(ptrace(PTRACE_TRACEME, 0, NULL, NULL));
}

static int mounted(void)
{
    return failed(mount("none", "/tmp", "tmpfs", 0, NULL));
}

static int unshared(void)
{
    return failed(unshare(CLONE_NEWNS));
}

static int rooted(void)
{
    return failed(chroot("/"));
}

static int rooted_by_user(void)
{
    return failed(setresuid(0, 0, 0));
}

static int renamed_host(void)
{
    return failed(sethostname("probe", 5));
}

static int has_personality(void)
{
    return failed(personality(0xffffffff));
}

static int tcp(void)
{
    return failed(socket(AF_INET, SOCK_STREAM, 0));
}

static int netlink(void)
{
    return failed(socket(AF_NETLINK, SOCK_RAW, 0));
}

static int ring(void)
{
    char parameters[120] = {0};
    return failed(syscall(SYS_io_uring_setup, 4, parameters));
}

static int watched_memory(void)
{
    return failed(syscall(SYS_userfaultfd, 0));
}

#ifdef __x86_64__
/* A number of the x32 ABI: another name of getpid, which a filter by number may not know. */
static int other_abi(void)
{
    return failed(syscall(0x40000000 | SYS_getpid));
}
#endif

static void *waits(void *nothing)
{
    (void)nothing;
    pause();
    return NULL;
}

static int threads(void)
{
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 65536);
    for (int i = 0; i < ABOVE; i++) {
        pthread_t one;
        int error = pthread_create(&one, &small, waits, NULL);
        if (error)
            return error;
    }
    return 0;
}

static int processes(void)
{
    pid_t children[ABOVE];
    int made = 0, error = 0;
    while (made < ABOVE && !error) {
        pid_t child = fork();
        if (child == 0) {
            sleep(30);
            _exit(0);
        }
        if (child < 0)
            error = errno;
        else
            children[made++] = child;
    }
    while (made--) {
        kill(children[made], SIGKILL);
        waitpid(children[made], NULL, 0);
    }
    return error;
}

static int memory(void)
{
    char *all = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        return errno;
    for (size_t at = 0; at < MEMORY; at += 4096)
        all[at] = 1;
    return 0;
}

static const struct {
    const char *name;
    int (*probe)(void);
} PROBES[] = {
    {"binary_exec_itself", exec_itself},
    {"binary_exec_descriptor", exec_descriptor},
    {"binary_memory_file", memory_file},
    {"binary_file_beside_itself", file_beside_itself},
    {"binary_own_mode", own_mode},
    {"binary_own_name", own_name},
    {"binary_interpreter", interpreter},
    {"binary_libraries", libraries},
    {"binary_traced", traced},
    {"binary_mount", mounted},
    {"binary_unshare", unshared},
    {"binary_chroot", rooted},
    {"binary_setresuid", rooted_by_user},
    {"binary_sethostname", renamed_host},
    {"binary_personality", has_personality},
    {"binary_tcp", tcp},
    {"binary_netlink", netlink},
    {"binary_io_uring", ring},
    {"binary_userfaultfd", watched_memory},
#ifdef __x86_64__
    {"binary_other_abi", other_abi},
#endif
    {"binary_threads", threads},
    {"binary_processes", processes},
    {"binary_memory", memory}, /* alone */
};

/* --- the protocol --------------------------------------------------------------------------------------------------- */

static char answer[LINE_BYTES];
static size_t answered;

static void say(const char *text)
{
    for (; *text != '\0' && answered + 3 < sizeof answer; text++) {
        if (*text == '"' || *text == '\\')
            answer[answered++] = '\\';
        answer[answered++] = *text;
    }
}

static void row(const char *name, const char *outcome, int error, const char *detail)
{
    const char *word = error ? strerrorname_np(error) : NULL;
    say(answered ? ", {\"probe\": \"" : "{\"probe\": \"");
    say(name);
    say("\", \"outcome\": \"");
    say(outcome);
    say(word ? "\", \"errno\": \"" : "\", \"errno\": null, \"detail\": \"");
    if (word) {
        say(word);
        say("\", \"detail\": \"");
    }
    say(detail);
    say("\"}");
}

static void run(const char *name, int (*probe)(void))
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        row(name, "broken", errno, "no pipe");
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        int error = probe();
        if (write(ends[1], &error, sizeof error) != sizeof error)
            _exit(1);
        _exit(0);
    }
    close(ends[1]);
    int error = 0, status = 0;
    ssize_t size = child < 0 ? -1 : read(ends[0], &error, sizeof error);
    close(ends[0]);
    if (child < 0 || waitpid(child, &status, 0) != child)
        row(name, "broken", errno, "no child");
    else if (WIFSIGNALED(status))
        row(name, "killed", 0, "by a signal");
    else if (WIFEXITED(status) && WEXITSTATUS(status) == STARTED)
        row(name, "succeeded", 0, "it was started");
    else if (size != sizeof error)
        row(name, "broken", 0, "no answer");
    else
        row(name, error ? "blocked" : "succeeded", error, error ? strerrordesc_np(error) : "done");
}

static void run_named(const char *name)
{
    for (size_t i = 0; i < sizeof PROBES / sizeof *PROBES; i++)
        if (strcmp(PROBES[i].name, name) == 0) {
            run(name, PROBES[i].probe);
            return;
        }
    row(name, "broken", 0, "no probe of this package has that name");
}

int main(int count, char **arguments)
{
    static char line[LINE_BYTES], text[TEXT_BYTES];
    if (count > 1 && strcmp(arguments[1], "--started") == 0)
        return STARTED;
    require_gvisor();
    if (fgets(line, sizeof line, stdin) == NULL)
        return 1;
    /* Whoever asks is our own test: ids have no character that JSON escapes. */
    const char *at = strstr(line, "\"text\"");
    if (at == NULL || sscanf(at, "\"text\" : \"%32767[^\"]\"", text) != 1)
        return 1;
    bool is_batch = strncmp(text, "batch:", 6) == 0;
    for (char *name = strtok(is_batch ? text + 6 : text, ","); name != NULL; name = strtok(NULL, ","))
        run_named(name);
    printf("{\"text\": \"%s%s%s\", \"sources\": []}\n", is_batch ? "[" : "", answer, is_batch ? "]" : "");
    return 0;
}
