/* A disk that hangs, for a program that has this library in LD_PRELOAD: calls for paths and files below $HANGS_BELOW do not
   return while the file $HANGS_WHILE exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static void wait_for_disk(const char *path) {
    const char *below = getenv("HANGS_BELOW"), *hangs = getenv("HANGS_WHILE");
    if (!path || !below || !hangs || strncmp(path, below, strlen(below)))
        return;
    while (!syscall(SYS_faccessat, AT_FDCWD, hangs, F_OK))
        usleep(20000);
}

static void wait_for_file(int fd) {
    char name[32], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, name, path, sizeof path - 1);
    if (size > 0) {
        path[size] = 0;
        wait_for_disk(path);
    }
}

#define REAL(type, name) ((type)dlsym(RTLD_NEXT, name))

#define OPEN(name)                                                                                                   \
    int name(const char *path, int flags, ...) {                                                                     \
        va_list rest;                                                                                                \
        va_start(rest, flags);                                                                                       \
        mode_t mode = va_arg(rest, mode_t);                                                                          \
        va_end(rest);                                                                                                \
        wait_for_disk(path);                                                                                         \
        return REAL(int (*)(const char *, int, ...), #name)(path, flags, mode);                                      \
    }
#define STAT(name, facts)                                                                                            \
    int name(const char *path, struct facts *found) {                                                                \
        wait_for_disk(path);                                                                                         \
        return REAL(int (*)(const char *, struct facts *), #name)(path, found);                                      \
    }
#define STAT_AT(name, facts)                                                                                         \
    int name(int folder, const char *path, struct facts *found, int flags) {                                         \
        wait_for_disk(path);                                                                                         \
        return REAL(int (*)(int, const char *, struct facts *, int), #name)(folder, path, found, flags);             \
    }
#define WRITE(name)                                                                                                  \
    ssize_t name(int fd, const void *data, size_t size, off_t at) {                                                  \
        wait_for_file(fd);                                                                                           \
        return REAL(ssize_t(*)(int, const void *, size_t, off_t), #name)(fd, data, size, at);                        \
    }
#define SYNC(name)                                                                                                   \
    int name(int fd) {                                                                                               \
        wait_for_file(fd);                                                                                           \
        return REAL(int (*)(int), #name)(fd);                                                                        \
    }

OPEN(open)
OPEN(open64)
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
STAT_AT(fstatat, stat)
STAT_AT(fstatat64, stat64)
WRITE(pwrite)
WRITE(pwrite64)
SYNC(fsync)
SYNC(fdatasync)

int mkdir(const char *path, mode_t mode) {
    wait_for_disk(path);
    return REAL(int (*)(const char *, mode_t), "mkdir")(path, mode);
}

int access(const char *path, int mode) {
    wait_for_disk(path);
    return REAL(int (*)(const char *, int), "access")(path, mode);
}
