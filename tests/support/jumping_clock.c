/* Preloaded in tests: the system's clock is set forth and back by a year, fifty times a second. Clocks that nobody can
   set are left alone. A wait until a time of the system's clock is written down in the file of JUMPING_CLOCK_WAITS:
   such a wait may end at once, or after a year. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const long year = 365L * 24 * 3600;

static long jump(void) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  struct timespec now;
  real(CLOCK_MONOTONIC, &now);
  return (now.tv_nsec / 20000000) % 2 ? year : -year;
}

int clock_gettime(clockid_t clock, struct timespec* found) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  const int status = real(clock, found);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += jump();
  return status;
}

int gettimeofday(struct timeval* found, void* zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  found->tv_sec = now.tv_sec;
  found->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* found) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}

static void waited(const char* how) {
  const char* path = getenv("JUMPING_CLOCK_WAITS");
  const int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  if (file < 0) return;
  if (write(file, how, strlen(how)) < 0) abort();
  close(file);
}

/* Times of the system's clock are decades after 1970, and no machine has run for so long. */
static int is_of_the_system(const struct timespec* until) { return until->tv_sec > 10 * year; }

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const struct timespec* until) {
  static int (*real)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
  if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  if (is_of_the_system(until)) waited("pthread_cond_timedwait\n");
  return real(condition, mutex, until);
}

int sem_timedwait(sem_t* semaphore, const struct timespec* until) {
  static int (*real)(sem_t*, const struct timespec*);
  if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
  waited("sem_timedwait\n");
  return real(semaphore, until);
}
