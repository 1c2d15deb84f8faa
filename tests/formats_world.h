// formats_world.h - an environment for tests of file formats: counted memory allocations and a
// small in-memory file system. Both can be made to fail at the n-th operation, and the file system
// tracks what would survive a power cut. Include it after the implementation of qlora.h.
#ifndef QLORA_FORMATS_WORLD_H
#define QLORA_FORMATS_WORLD_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define WORLD_FILES 96
#define WORLD_NAME 96

// A file. Bytes after `synced` are lost in a power cut.
typedef struct world_file {
    char name[WORLD_NAME];
    unsigned char* data;
    size_t size;
    size_t room; // bytes that data has room for
    size_t synced;
} world_file;

typedef struct world {
    qlora__env env;
    world_file files[WORLD_FILES]; // by name, as programs see them
    world_file disk[WORLD_FILES];  // names and bytes that survive a power cut
    long operations;               // allocations and file calls so far
    long fail_at;                  // this operation fails, 0 = none
    bool fail_on;                  // and so do all later ones
    long cut_at;                   // nothing reaches the disk from this operation on, 0 = never
    long blocks;                   // live allocations
    long handles;                  // open files and maps
    bool close_failed;             // the only failure that a reader may ignore
} world;

// Counts an operation and returns whether it must fail.
static bool world_fails(world* w) {
    w->operations++;
    return w->fail_at > 0 &&
           (w->operations == w->fail_at || (w->fail_on && w->operations > w->fail_at));
}

static void* world_alloc(size_t bytes, size_t align, void* user) {
    world* w = (world*)user;
    (void)align;
    if (world_fails(w)) {
        return NULL;
    }
    w->blocks++;
    return malloc(bytes);
}

static void world_free(void* pointer, size_t bytes, void* user) {
    (void)bytes;
    ((world*)user)->blocks--;
    free(pointer);
}

static world_file* world_slot(world_file* files, const char* name) {
    for (int i = 0; i < WORLD_FILES; i++) {
        if (strcmp(files[i].name, name) == 0) {
            return &files[i];
        }
    }
    return NULL;
}

static void world_drop(world_file* file) {
    free(file->data);
    memset(file, 0, sizeof *file);
}

static void world_set(world_file* files, const char* name, const void* data, size_t size) {
    world_file* file = world_slot(files, name);
    if (!file) {
        file = world_slot(files, "");
    }
    if (!file || strlen(name) >= WORLD_NAME) {
        abort();
    }
    free(file->data);
    file->room = size + 1;
    file->data = malloc(file->room);
    memcpy(file->data, data, size);
    file->size = size;
    file->synced = size;
    memcpy(file->name, name, strlen(name) + 1);
}

// Creates a file that is already synced to disk.
static void world_put(world* w, const char* name, const void* data, size_t size) {
    world_set(w->files, name, data, size);
    world_set(w->disk, name, data, size);
}

static bool world_cut(const world* w) {
    return w->cut_at > 0 && w->operations >= w->cut_at;
}

static int world_open(const char* path, qlora_file_mode mode, void** file, void* user) {
    world* w = (world*)user;
    if (world_fails(w)) {
        return EIO;
    }
    world_file* found = world_slot(w->files, path);
    if (mode == QLORA_FILE_CREATE && found) {
        return EEXIST;
    }
    if (mode == QLORA_FILE_CREATE) {
        world_set(w->files, path, "", 0);
        found = world_slot(w->files, path);
    }
    if (!found) {
        return ENOENT;
    }
    w->handles++;
    *file = found;
    return 0;
}

static int64_t world_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)file;
    (void)buffer;
    (void)bytes;
    (void)user;
    return -EIO; // readers map files instead
}

static int64_t world_read_at(void* file, void* buffer, size_t bytes, uint64_t offset, void* user) {
    (void)offset;
    return world_read(file, buffer, bytes, user);
}

// Accepts at most 1000 bytes at a time, like a write that is cut short by a signal.
static int64_t world_write(void* file, const void* data, size_t bytes, void* user) {
    world_file* f = (world_file*)file;
    if (world_fails((world*)user)) {
        return -ENOSPC;
    }
    size_t n = bytes < 1000 ? bytes : 1000;
    if (f->size + n > f->room) {
        f->room = 2 * (f->size + n);
        f->data = realloc(f->data, f->room);
    }
    memcpy(f->data + f->size, data, n);
    f->size += n;
    return (int64_t)n;
}

static int world_sync(void* file, void* user) {
    world* w = (world*)user;
    world_file* f = (world_file*)file;
    if (world_fails(w)) {
        return EIO;
    }
    if (!world_cut(w)) {
        f->synced = f->size;
    }
    return 0;
}

static int world_close(void* file, void* user) {
    world* w = (world*)user;
    (void)file;
    w->handles--;
    if (world_fails(w)) {
        w->close_failed = true;
        return EIO;
    }
    return 0;
}

// On disk, a renamed file contains only the bytes that were synced.
static int world_rename(const char* from, const char* to, void* user) {
    world* w = (world*)user;
    if (world_fails(w)) {
        return EACCES;
    }
    world_file* f = world_slot(w->files, from);
    if (!f) {
        return ENOENT;
    }
    if (!world_cut(w)) {
        world_set(w->disk, to, f->data, f->synced);
    }
    size_t synced = f->synced;
    world_set(w->files, to, f->data, f->size);
    world_slot(w->files, to)->synced = synced;
    world_drop(f);
    return 0;
}

static int world_remove(const char* path, void* user) {
    world* w = (world*)user;
    world_file* f = world_slot(w->files, path);
    if (world_fails(w) || !f) {
        return ENOENT;
    }
    world_drop(f);
    return 0;
}

static int world_make_dir(const char* path, void* user) {
    (void)path;
    return world_fails((world*)user) ? EACCES : 0;
}

static int world_sync_dir(const char* path, void* user) {
    (void)path;
    return world_fails((world*)user) ? EIO : 0;
}

// Returns a copy of exactly the file's size, so that a sanitizer detects every access beyond it.
static int world_map(const char* path, const void** data, uint64_t* bytes, void** handle,
                     void* user) {
    world* w = (world*)user;
    if (world_fails(w)) {
        return EIO;
    }
    world_file* f = world_slot(w->files, path);
    if (!f) {
        return ENOENT;
    }
    unsigned char* copy = malloc(f->size > 0 ? f->size : 1);
    memcpy(copy, f->data, f->size);
    w->handles++;
    *data = copy;
    *bytes = f->size;
    *handle = copy;
    return 0;
}

static void world_unmap(const void* data, uint64_t bytes, void* handle, void* user) {
    (void)data;
    (void)bytes;
    ((world*)user)->handles--;
    free(handle);
}

static void world_begin(world* w) {
    memset(w, 0, sizeof *w);
    qlora__env* e = &w->env;
    e->allocator.alloc = world_alloc;
    e->allocator.free = world_free;
    e->allocator.user = w;
    e->files.open = world_open;
    e->files.read = world_read;
    e->files.read_at = world_read_at;
    e->files.write = world_write;
    e->files.sync = world_sync;
    e->files.close = world_close;
    e->files.rename = world_rename;
    e->files.remove = world_remove;
    e->files.make_dir = world_make_dir;
    e->files.sync_dir = world_sync_dir;
    e->files.map = world_map;
    e->files.unmap = world_unmap;
    e->files.user = w;
}

// Returns true if nothing has leaked.
static bool world_end(world* w) {
    for (int i = 0; i < WORLD_FILES; i++) {
        world_drop(&w->files[i]);
        world_drop(&w->disk[i]);
    }
    return w->blocks == 0 && w->handles == 0 && w->env.host_bytes == 0;
}

#endif
