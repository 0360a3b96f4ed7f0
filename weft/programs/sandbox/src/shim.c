/* What runs on a guest's stack in place of Python: each import of a guest ends here, is written down, and suspends the
 * guest. Python reads the request after `weft_poll` has returned, answers, and polls again.
 *
 * Also here: the clock of guests (answered at once), the thread that advances the engine's epoch while guests run, and
 * the measure of the time a guest computes. Calls of libwasmtime go through pointers that Python sets, so that this
 * library links to nothing but libc. The structures below are those of wasmtime's C API; `weft_layout` lets Python
 * compare them with what the installed version says. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- wasmtime's structures */

typedef struct { size_t size; char *data; } byte_vec;

typedef struct {
  uint8_t kind;
  union { int32_t i32; int64_t i64; float f32; double f64; uint8_t v128[16]; struct { uint64_t a; uint64_t b; uint64_t c; } ref; } of;
} core_val;

typedef struct {
  uint8_t kind;
  union { bool boolean; double f64; byte_vec string; struct { uint64_t a; uint64_t b; uint64_t c; } other; } of;
} component_val;

typedef struct {
  bool (*callback)(void *env);
  void *env;
  void (*finalizer)(void *env);
} continuation;

enum { CORE_I32 = 0, CORE_I64 = 1, CORE_F32 = 2, CORE_F64 = 3 };

static struct {
  bool (*poll)(void *future);
  void (*set_deadline)(void *context, uint64_t ticks);
  void (*new_bytes)(byte_vec *out, size_t size);
  void (*increment_epoch)(void *engine);
  uint8_t kind_f64, kind_string;
} api;

/* ---- fibers */

enum { MAX_ARGS = 8 };
enum { YIELDED = 0, FINISHED = 1, PARKED = 2, GARBLED = 3 };

typedef struct {
  /* Python reads and writes these. */
  uint32_t function;    /* which import was called */
  uint32_t count;       /* of args */
  int64_t args[MAX_ARGS]; /* bits of numbers; of a component's call: the number beside the bytes */
  uint8_t *bytes;       /* of a component's call */
  size_t size;
  double cpu_s;
  double clock_offset;  /* from the monotonic clock to what the guest is told */
  /* Python leaves these alone. */
  void *context;
  void *results;
  size_t num_results;
  int32_t ready;
  int32_t state;
} fiber;

static _Thread_local fiber *current;

static double seconds(clockid_t clock) {
  struct timespec at;
  clock_gettime(clock, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static bool is_ready(void *env) { return ((fiber *)env)->ready != 0; }
static void nothing(void *env) { (void)env; }

static void suspend(fiber *self, continuation *out) {
  out->callback = is_ready;
  out->env = self;
  out->finalizer = nothing;
}

EXPORT fiber *weft_fiber_new(void *context) {
  fiber *self = calloc(1, sizeof(fiber));
  if (self != NULL) {
    self->context = context;
    self->clock_offset = seconds(CLOCK_REALTIME) - seconds(CLOCK_MONOTONIC);
  }
  return self;
}

EXPORT void weft_fiber_delete(fiber *self) {
  if (self != NULL) free(self->bytes);
  free(self);
}

/* ---- imports of core modules. env: the number of the function. */

EXPORT void weft_on_core_call(void *env, void *caller, const core_val *args, size_t num_args, core_val *results,
                              size_t num_results, void **trap, continuation *out) {
  (void)caller; (void)trap;
  fiber *self = current;
  self->function = (uint32_t)(uintptr_t)env;
  self->count = (uint32_t)(num_args < MAX_ARGS ? num_args : MAX_ARGS);
  for (uint32_t i = 0; i < self->count; i++)
    self->args[i] = args[i].kind == CORE_I32 ? (int64_t)args[i].of.i32
                  : args[i].kind == CORE_F32 ? (int64_t)(uint32_t)args[i].of.i32 : args[i].of.i64;
  self->results = results;
  self->num_results = num_results;
  self->ready = 0;
  self->state = PARKED;
  suspend(self, out);
}

EXPORT void weft_on_core_now(void *env, void *caller, const core_val *args, size_t num_args, core_val *results,
                             size_t num_results, void **trap, continuation *out) {
  (void)env; (void)caller; (void)args; (void)num_args; (void)trap;
  if (num_results > 0) {
    results[0].kind = CORE_F64;
    results[0].of.f64 = seconds(CLOCK_MONOTONIC) + current->clock_offset;
  }
  current->ready = 1;
  suspend(current, out);
}

EXPORT void weft_answer_i32(fiber *self, int32_t value) {
  if (self->num_results > 0) {
    core_val *result = self->results;
    result->kind = CORE_I32;
    result->of.i32 = value;
  }
  self->ready = 1;
}

/* ---- exports. wasmtime reads any export as a function where it is told that it is one, and crashes. An export begins
 * with one byte that says its kind; `bindings` checks that layout. */

EXPORT int weft_is_kind(const uint8_t *exported, uint8_t kind) { return exported[0] == kind; }

/* ---- imports of components. Strings are bytes, each a character from 0 to 255. */

static bool narrow(const byte_vec *text, uint8_t **out, size_t *size) {
  uint8_t *to = malloc(text->size ? text->size : 1);
  if (to == NULL) return false;
  const uint8_t *from = (const uint8_t *)text->data;
  size_t n = 0;
  for (size_t i = 0; i < text->size; i++) {
    uint8_t c = from[i];
    if (c >= 0x80) {
      if (c > 0xc3 || i + 1 >= text->size) { free(to); return false; }
      c = (uint8_t)(c << 6 | (from[++i] & 0x3f));
    }
    to[n++] = c;
  }
  *out = to;
  *size = n;
  return true;
}

static size_t widened(const uint8_t *from, size_t size) {
  size_t n = size;
  for (size_t i = 0; i < size; i++) n += from[i] >> 7;
  return n;
}

static void widen(const uint8_t *from, size_t size, uint8_t *to) {
  for (size_t i = 0; i < size; i++) {
    if (from[i] < 0x80) *to++ = from[i];
    else { *to++ = (uint8_t)(0xc0 | from[i] >> 6); *to++ = (uint8_t)(0x80 | (from[i] & 0x3f)); }
  }
}

static void set_string(component_val *out, const uint8_t *bytes, size_t size) {
  out->kind = api.kind_string;
  api.new_bytes(&out->of.string, widened(bytes, size));
  widen(bytes, size, (uint8_t *)out->of.string.data);
}

EXPORT void weft_on_component_call(void *env, void *context, const void *type, component_val *args, size_t num_args,
                                   component_val *results, size_t num_results, void **error, continuation *out) {
  (void)context; (void)type; (void)error;
  fiber *self = current;
  free(self->bytes);
  self->bytes = NULL;
  self->size = 0;
  self->function = (uint32_t)(uintptr_t)env;
  self->count = 1;
  self->results = results;
  self->num_results = num_results;
  self->ready = 0;
  self->state = PARKED;
  if (num_args != 2 || args[0].kind != api.kind_string || args[1].kind != api.kind_f64 ||
      !narrow(&args[0].of.string, &self->bytes, &self->size)) self->state = GARBLED;
  else memcpy(&self->args[0], &args[1].of.f64, sizeof(double));
  suspend(self, out);
}

EXPORT void weft_on_component_now(void *env, void *context, const void *type, component_val *args, size_t num_args,
                                  component_val *results, size_t num_results, void **error, continuation *out) {
  (void)env; (void)context; (void)type; (void)args; (void)num_args; (void)error;
  if (num_results > 0) {
    results[0].kind = api.kind_f64;
    results[0].of.f64 = seconds(CLOCK_MONOTONIC) + current->clock_offset;
  }
  current->ready = 1;
  suspend(current, out);
}

EXPORT void weft_answer_bytes(fiber *self, const uint8_t *bytes, size_t size) {
  if (self->num_results > 0) set_string(self->results, bytes, size);
  self->ready = 1;
}

/* Strings as arguments and as the result of a component's function. */
EXPORT void weft_set_string(component_val *out, const uint8_t *bytes, size_t size) { set_string(out, bytes, size); }

EXPORT int weft_take_string(const component_val *value, uint8_t **out, size_t *size) {
  return value->kind == api.kind_string && narrow(&value->of.string, out, size);
}

EXPORT void weft_free(void *bytes) { free(bytes); }

/* ---- the epoch: one thread per engine, asleep while no guest runs */

enum { IDLE_TICKS = 50 };

typedef struct {
  void *engine;
  struct timespec period;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  atomic_uint_fast64_t polls;
  atomic_int running, asleep, stopped;
} ticker;

static void *tick(void *env) {
  ticker *self = env;
  uint_fast64_t seen = 0;
  int idle = 0;
  while (!atomic_load(&self->stopped)) {
    nanosleep(&self->period, NULL);
    uint_fast64_t polls = atomic_load(&self->polls);
    if (polls != seen || atomic_load(&self->running) > 0) {
      seen = polls;
      idle = 0;
      api.increment_epoch(self->engine);
    } else if (++idle > IDLE_TICKS) {
      pthread_mutex_lock(&self->lock);
      atomic_store(&self->asleep, 1);
      /* A poll that began after the look above sees `asleep`, or is seen here. */
      while (atomic_load(&self->polls) == seen && !atomic_load(&self->stopped))
        pthread_cond_wait(&self->wake, &self->lock);
      atomic_store(&self->asleep, 0);
      pthread_mutex_unlock(&self->lock);
      idle = 0;
    }
  }
  return NULL;
}

EXPORT ticker *weft_ticker_start(void *engine, double period_s) {
  ticker *self = calloc(1, sizeof(ticker));
  if (self == NULL) return NULL;
  self->engine = engine;
  self->period.tv_sec = (time_t)period_s;
  self->period.tv_nsec = (long)((period_s - (double)self->period.tv_sec) * 1e9);
  pthread_mutex_init(&self->lock, NULL);
  pthread_cond_init(&self->wake, NULL);
  if (pthread_create(&self->thread, NULL, tick, self) != 0) {
    free(self);
    return NULL;
  }
  return self;
}

static void rouse(ticker *self) {
  if (atomic_load(&self->asleep)) {
    pthread_mutex_lock(&self->lock);
    pthread_cond_signal(&self->wake);
    pthread_mutex_unlock(&self->lock);
  }
}

EXPORT void weft_ticker_stop(ticker *self) {
  atomic_store(&self->stopped, 1);
  pthread_mutex_lock(&self->lock);
  pthread_cond_signal(&self->wake);
  pthread_mutex_unlock(&self->lock);
  pthread_join(self->thread, NULL);
  pthread_mutex_destroy(&self->lock);
  pthread_cond_destroy(&self->wake);
  free(self);
}

EXPORT int weft_ticker_is_asleep(ticker *self) { return atomic_load(&self->asleep); }

/* ---- running a guest until it ends, asks for something, or has used up its turn */

EXPORT int weft_poll(fiber *self, void *future, ticker *clock) {
  if (self->state == PARKED) api.set_deadline(self->context, 1);
  self->state = YIELDED;
  atomic_fetch_add(&clock->running, 1);
  atomic_fetch_add(&clock->polls, 1);
  rouse(clock);
  current = self;
  double start = seconds(CLOCK_THREAD_CPUTIME_ID);
  bool is_over = api.poll(future);
  self->cpu_s += seconds(CLOCK_THREAD_CPUTIME_ID) - start;
  current = NULL;
  atomic_fetch_sub(&clock->running, 1);
  return is_over ? FINISHED : self->state;
}

/* ---- set-up */

EXPORT void weft_set_up(void *poll, void *set_deadline, void *new_bytes, void *increment_epoch, uint8_t kind_f64,
                        uint8_t kind_string) {
  api.poll = (bool (*)(void *))poll;
  api.set_deadline = (void (*)(void *, uint64_t))set_deadline;
  api.new_bytes = (void (*)(byte_vec *, size_t))new_bytes;
  api.increment_epoch = (void (*)(void *))increment_epoch;
  api.kind_f64 = kind_f64;
  api.kind_string = kind_string;
}

/* Sizes and offsets, to be compared with the bindings'. */
EXPORT void weft_layout(uint64_t out[8]) {
  out[0] = sizeof(core_val);
  out[1] = offsetof(core_val, of);
  out[2] = sizeof(component_val);
  out[3] = offsetof(component_val, of);
  out[4] = sizeof(byte_vec);
  out[5] = sizeof(continuation);
  out[6] = offsetof(continuation, env);
  out[7] = sizeof(fiber);
}

EXPORT const char *weft_source_hash(void) { return WEFT_SOURCE_HASH; }
