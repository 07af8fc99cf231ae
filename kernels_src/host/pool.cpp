// Threads that help with a launch. One library for all kernels, so that there is one set of
// threads.
//
// The launching thread works too, and never waits for a helper that has not started: with no helper
// at all (after a fork, or when all are busy) a launch only takes longer. A helper that has just
// worked spins for a while before it sleeps, since launches come in bursts and waking takes longer
// than a small one.
#include <pthread.h>
#include <sched.h>
#include <time.h>

namespace {

struct Job {
  void (*work)(void*);
  void* argument;
  int open_places;  // helpers that may still join
  int running;      // helpers at work
  Job* next;
};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t called = PTHREAD_COND_INITIALIZER;
pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
Job* jobs = nullptr;
int num_threads = 0;
unsigned num_called = 0;  // jobs so far; read without the lock

constexpr long long kLookOutNanoseconds = 100'000;

// Tiles of wide rows lie on the stack. musl gives a thread 128 KiB, and macOS 512 KiB.
constexpr size_t kStackBytes = 8 << 20;

long long now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

// Spin, without the lock, until `(*number == value) == expected`, or for a while.
template <typename T>
void spin_until(const T* number, T value, bool expected) {
  const long long stop = now_ns() + kLookOutNanoseconds;
  while ((__atomic_load_n(number, __ATOMIC_ACQUIRE) == value) != expected && now_ns() < stop) {
    sched_yield();
  }
}

Job* find_job() {
  for (Job* job = jobs; job; job = job->next) {
    if (job->open_places > 0) return job;
  }
  return nullptr;
}

void* help(void*) {
  pthread_mutex_lock(&lock);
  for (;;) {
    Job* job = find_job();
    if (!job) {
      pthread_cond_wait(&called, &lock);
      continue;
    }
    --job->open_places;
    ++job->running;
    pthread_mutex_unlock(&lock);
    job->work(job->argument);
    pthread_mutex_lock(&lock);
    if (__atomic_sub_fetch(&job->running, 1, __ATOMIC_RELEASE) == 0)
      pthread_cond_broadcast(&finished);
    if (find_job()) continue;
    const unsigned seen = num_called;
    pthread_mutex_unlock(&lock);
    spin_until(&num_called, seen, false);
    pthread_mutex_lock(&lock);
  }
}

// After a fork the child has none of the threads, and perhaps a lock that one of them held.
void forget_threads() {
  lock = PTHREAD_MUTEX_INITIALIZER;
  called = PTHREAD_COND_INITIALIZER;
  finished = PTHREAD_COND_INITIALIZER;
  jobs = nullptr;
  num_threads = 0;
}

void add_threads(int count) {
  if (num_threads >= count) return;
  if (num_threads == 0) pthread_atfork(nullptr, nullptr, forget_threads);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  for (; num_threads < count; ++num_threads) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, help, nullptr) != 0) break;
  }
  pthread_attr_destroy(&attributes);
}

}  // namespace

// Run `work(argument)` here and on up to `helpers` threads more; return when all of them are done.
extern "C" __attribute__((visibility("default"))) void kvcupy_run_together(void (*work)(void*),
                                                                           void* argument,
                                                                           int helpers) {
  Job job{work, argument, helpers, 0, nullptr};
  pthread_mutex_lock(&lock);
  add_threads(helpers);
  job.next = jobs;
  jobs = &job;
  __atomic_store_n(&num_called, num_called + 1, __ATOMIC_RELEASE);
  if (helpers == 1) {
    pthread_cond_signal(&called);
  } else {
    pthread_cond_broadcast(&called);
  }
  pthread_mutex_unlock(&lock);

  work(argument);

  pthread_mutex_lock(&lock);
  Job** link = &jobs;
  while (*link != &job) link = &(*link)->next;
  *link = job.next;  // no helper joins any more
  if (job.running > 0) {
    pthread_mutex_unlock(&lock);
    spin_until(&job.running, 0, true);
    pthread_mutex_lock(&lock);
  }
  while (job.running > 0) pthread_cond_wait(&finished, &lock);
  pthread_mutex_unlock(&lock);
}
