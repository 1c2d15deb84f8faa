// comm_rig.h - processes that train together, as threads of one process: a provider whose messages
// are copied through memory.
#ifndef QLORA_COMM_RIG_H
#define QLORA_COMM_RIG_H

#include "model_rig.h"

#include <pthread.h>
#include <time.h>

enum { COMM_WORLD = 8 };

typedef struct comm_letter {
    struct comm_letter* next;
    size_t bytes;
    char* data;
} comm_letter;

typedef struct comm_post {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t world;
    comm_letter* first[COMM_WORLD][COMM_WORLD]; // from, to
    int32_t broken;                             // rank that failed, or -1
    int fails_rank;                             // this rank fails at its exchange number fails_at
    int fails_at;
    int calls[COMM_WORLD];
    int slow_rank; // this rank takes its time after every exchange, or -1
    bool slow_done; // it has returned from its first one
} comm_post;

typedef struct comm_end {
    comm_post* post;
    int32_t rank;
} comm_end;

static inline void comm_post_open(comm_post* p, int32_t world) {
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    p->world = world;
    p->broken = -1;
    p->fails_rank = -1;
    p->slow_rank = -1;
}

static inline void comm_post_close(comm_post* p) {
    for (int i = 0; i < COMM_WORLD * COMM_WORLD; i++) {
        comm_letter* letter = p->first[i / COMM_WORLD][i % COMM_WORLD];
        while (letter != NULL) {
            comm_letter* next = letter->next;
            free(letter->data);
            free(letter);
            letter = next;
        }
    }
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
}

static inline void comm_break(comm_post* p, int32_t rank) {
    pthread_mutex_lock(&p->lock);
    p->broken = p->broken < 0 ? rank : p->broken;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static inline void comm_drop(comm_post* p, int32_t from, int32_t to, const qlora_message* m) {
    comm_letter* letter = (comm_letter*)malloc(sizeof *letter);
    letter->next = NULL;
    letter->bytes = m->bytes;
    letter->data = (char*)malloc(m->bytes);
    memcpy(letter->data, m->data, m->bytes);
    comm_letter** at = &p->first[from][to];
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = letter;
}

// With the lock held.
static inline bool comm_take(comm_post* p, int32_t from, int32_t to, const qlora_message* m) {
    while (p->first[from][to] == NULL && p->broken < 0) {
        pthread_cond_wait(&p->changed, &p->lock);
    }
    comm_letter* letter = p->first[from][to];
    if (letter == NULL) {
        return false;
    }
    p->first[from][to] = letter->next;
    bool fits = letter->bytes == m->bytes;
    if (fits) {
        memcpy(m->data, letter->data, m->bytes);
    }
    free(letter->data);
    free(letter);
    return fits;
}

static inline bool comm_exchange(const qlora_message* messages, int64_t count, void* stream,
                                 char* why, size_t why_size, void* user) {
    comm_end* end = (comm_end*)user;
    comm_post* p = end->post;
    (void)stream;
    pthread_mutex_lock(&p->lock);
    bool ok = p->fails_rank != end->rank || p->calls[end->rank] != p->fails_at;
    p->calls[end->rank]++;
    if (!ok) {
        snprintf(why, why_size, "the cable is gone");
        p->broken = end->rank;
    }
    for (int64_t i = 0; i < count && ok; i++) {
        if (!messages[i].receive) {
            comm_drop(p, end->rank, messages[i].peer, &messages[i]);
        }
    }
    pthread_cond_broadcast(&p->changed);
    for (int64_t i = 0; i < count && ok; i++) {
        if (messages[i].receive && !comm_take(p, messages[i].peer, end->rank, &messages[i])) {
            snprintf(why, why_size, "rank %d has ended", (int)p->broken);
            ok = false;
        }
    }
    pthread_mutex_unlock(&p->lock);
    if (p->slow_rank == end->rank) {
        const struct timespec pause = {0, 30000000};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&p->lock);
        p->slow_done = true;
        pthread_mutex_unlock(&p->lock);
    }
    return ok;
}

static inline qlora_comm comm_of(comm_end* end) {
    qlora_comm c;
    memset(&c, 0, sizeof c);
    c.rank = end->rank;
    c.world = end->post->world;
    c.exchange = comm_exchange;
    c.user = end;
    return c;
}

#endif
