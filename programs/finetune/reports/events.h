// events.h - TensorBoard's event files: records of protobuf messages with checksums.
//
// A record is the length of its data (8 bytes), a checksum of these bytes, the data, and a checksum
// of the data, all little endian. The data is a message tensorflow.Event: wall_time (field 1,
// double), step (2, int64), and either file_version (3, in the first record) or summary (5), which
// has one `value` (1) per tag: tag (1) with simple_value (2, float), or tag, tensor (8) and
// metadata (9) for texts.
#ifndef FINETUNE_EVENTS_H
#define FINETUNE_EVENTS_H

#include "../../blob.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// CRC-32C (Castagnoli), reflected, four bits at a time.
static inline uint32_t crc32c(const void* data, size_t size) {
    static const uint32_t table[16] = {0x00000000u, 0x105ec76fu, 0x20bd8edeu, 0x30e349b1u,
                                       0x417b1dbcu, 0x5125dad3u, 0x61c69362u, 0x7198540du,
                                       0x82f63b78u, 0x92a8fc17u, 0xa24bb5a6u, 0xb21572c9u,
                                       0xc38d26c4u, 0xd3d3e1abu, 0xe330a81au, 0xf36e6f75u};
    const unsigned char* p = (const unsigned char*)data;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= p[i];
        crc = (crc >> 4) ^ table[crc & 15u];
        crc = (crc >> 4) ^ table[crc & 15u];
    }
    return crc ^ 0xffffffffu;
}

// As it is stored: a checksum of data that contains checksums would be weak.
static inline uint32_t crc32c_masked(const void* data, size_t size) {
    uint32_t crc = crc32c(data, size);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

static inline bool event_fixed(blob* out, uint64_t value, int bytes) { // little endian
    unsigned char text[8];
    for (int i = 0; i < bytes; i++) {
        text[i] = (unsigned char)(value >> (8 * i));
    }
    return blob_add(out, text, (size_t)bytes);
}

static inline uint64_t event_number(const unsigned char* data, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)data[i] << (8 * i);
    }
    return value;
}

#define EVENT_FRAME 12 // bytes of a record before its data; 4 follow it

static inline bool event_record(blob* out, const void* data, size_t size) {
    size_t start = out->count;
    return event_fixed(out, size, 8) && event_fixed(out, crc32c_masked(out->data + start, 8), 4) &&
           blob_add(out, data, size) && event_fixed(out, crc32c_masked(data, size), 4);
}

// ---- messages ----

enum { EVENT_VARINT = 0, EVENT_DOUBLE = 1, EVENT_BYTES = 2, EVENT_FLOAT = 5 }; // wire types

static inline bool event_varint(blob* out, uint64_t value) {
    unsigned char text[10];
    size_t count = 0;
    for (; value >= 128; value >>= 7) {
        text[count++] = (unsigned char)(value | 128);
    }
    text[count++] = (unsigned char)value;
    return blob_add(out, text, count);
}

static inline bool event_field(blob* out, int number, int type) {
    return event_varint(out, (uint64_t)(number << 3 | type));
}

static inline bool event_bytes(blob* out, int number, const void* data, size_t size) {
    return event_field(out, number, EVENT_BYTES) && event_varint(out, size) &&
           blob_add(out, data, size);
}

static inline bool event_start(blob* out, double wall_time, int64_t step) {
    uint64_t bits = 0;
    memcpy(&bits, &wall_time, sizeof bits);
    return event_field(out, 1, EVENT_DOUBLE) && event_fixed(out, bits, 8) &&
           event_field(out, 2, EVENT_VARINT) && event_varint(out, (uint64_t)step);
}

// The first record of a file.
static inline bool event_version(blob* out, double wall_time) {
    static const char version[] = "brain.Event:2";
    blob event;
    memset(&event, 0, sizeof event);
    bool ok = event_start(&event, wall_time, 0) &&
              event_bytes(&event, 3, version, sizeof version - 1) &&
              event_record(out, event.data, event.count);
    blob_free(&event);
    return ok;
}

// Adds a number to a summary.
static inline bool event_scalar(blob* summary, const char* tag, float value) {
    blob one;
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    memset(&one, 0, sizeof one);
    bool ok = event_bytes(&one, 1, tag, strlen(tag)) && event_field(&one, 2, EVENT_FLOAT) &&
              event_fixed(&one, bits, 4) && event_bytes(summary, 1, one.data, one.count);
    blob_free(&one);
    return ok;
}

// Adds a text, which the plugin `text` shows: a tensor of one string.
static inline bool event_text(blob* summary, const char* tag, const char* text, size_t size) {
    static const char plugin[] = "\x0a\x06\x0a\x04text"; // metadata: plugin_data (1), its name (1)
    static const char shape[] = "\x12\x02\x08\x01";      // of the tensor: dim (2), size (1) = 1
    blob tensor;
    blob one;
    memset(&tensor, 0, sizeof tensor);
    memset(&one, 0, sizeof one);
    bool ok = event_field(&tensor, 1, EVENT_VARINT) && event_varint(&tensor, 7) && // DT_STRING
              event_bytes(&tensor, 2, shape, sizeof shape - 1) &&
              event_bytes(&tensor, 8, text, size) && event_bytes(&one, 1, tag, strlen(tag)) &&
              event_bytes(&one, 8, tensor.data, tensor.count) &&
              event_bytes(&one, 9, plugin, sizeof plugin - 1) &&
              event_bytes(summary, 1, one.data, one.count);
    blob_free(&tensor);
    blob_free(&one);
    return ok;
}

// Adds a setting to the SessionStartInfo of the plugin `hparams`: a number, or a text.
static inline bool event_hparam(blob* info, const char* name, const char* text) {
    blob value;
    blob entry;
    char* end = NULL;
    double number = strtod(text, &end);
    uint64_t bits = 0;
    memcpy(&bits, &number, sizeof bits);
    memset(&value, 0, sizeof value);
    memset(&entry, 0, sizeof entry);
    bool is_number = text[0] != '\0' && *end == '\0';
    bool ok = is_number ? event_field(&value, 2, EVENT_DOUBLE) && event_fixed(&value, bits, 8)
                        : event_bytes(&value, 3, text, strlen(text));
    ok = ok && event_bytes(&entry, 1, name, strlen(name)) &&
         event_bytes(&entry, 2, value.data, value.count) &&
         event_bytes(info, 1, entry.data, entry.count);
    blob_free(&value);
    blob_free(&entry);
    return ok;
}

// Adds the settings to a summary: metadata of a tensor without content.
static inline bool event_hparams(blob* summary, const blob* info) {
    static const char tag[] = "_hparams_/session_start_info";
    // DT_FLOAT, a shape of one dimension of size 1, the value 0.
    static const char tensor[] = "\x08\x01\x12\x04\x12\x02\x08\x01\x2a\x04\0\0\0\0";
    blob content;
    blob plugin;
    blob metadata;
    blob one;
    memset(&content, 0, sizeof content);
    memset(&plugin, 0, sizeof plugin);
    memset(&metadata, 0, sizeof metadata);
    memset(&one, 0, sizeof one);
    bool ok = event_bytes(&content, 3, info->data, info->count) &&
              event_bytes(&plugin, 1, "hparams", 7) &&
              event_bytes(&plugin, 2, content.data, content.count) &&
              event_bytes(&metadata, 1, plugin.data, plugin.count) &&
              event_field(&metadata, 4, EVENT_VARINT) && event_varint(&metadata, 2) && // a tensor
              event_bytes(&one, 1, tag, sizeof tag - 1) &&
              event_bytes(&one, 8, tensor, sizeof tensor - 1) &&
              event_bytes(&one, 9, metadata.data, metadata.count) &&
              event_bytes(summary, 1, one.data, one.count);
    blob_free(&content);
    blob_free(&plugin);
    blob_free(&metadata);
    blob_free(&one);
    return ok;
}

static inline bool event_summary(blob* out, double wall_time, int64_t step, const blob* summary) {
    blob event;
    memset(&event, 0, sizeof event);
    bool ok = event_start(&event, wall_time, step) &&
              event_bytes(&event, 5, summary->data, summary->count) &&
              event_record(out, event.data, event.count);
    blob_free(&event);
    return ok;
}

// ---- reading, to continue a file ----

// The step of an event that was written by event_start; -1 if it is not one.
static inline int64_t event_step(const unsigned char* data, size_t size) {
    uint64_t step = 0;
    if (size < 11 || data[0] != (1 << 3 | EVENT_DOUBLE) || data[9] != (2 << 3 | EVENT_VARINT)) {
        return -1;
    }
    for (size_t i = 0; i < 9 && 10 + i < size; i++) {
        step |= (uint64_t)(data[10 + i] & 127) << (7 * i);
        if (data[10 + i] < 128) {
            return (int64_t)step;
        }
    }
    return -1;
}

#define EVENT_LARGEST (1u << 26) // bytes; ours are far smaller

// Reads the next record into `data`. False at the end of the file and at a damaged record.
static inline bool event_read(FILE* file, blob* data) {
    unsigned char frame[EVENT_FRAME];
    unsigned char block[4096];
    data->count = 0;
    if (fread(frame, 1, sizeof frame, file) != sizeof frame ||
        event_number(frame + 8, 4) != crc32c_masked(frame, 8)) {
        return false;
    }
    uint64_t left = event_number(frame, 8);
    if (left > EVENT_LARGEST) {
        return false;
    }
    while (left > 0) {
        size_t part = left < sizeof block ? (size_t)left : sizeof block;
        if (fread(block, 1, part, file) != part || !blob_add(data, block, part)) {
            return false;
        }
        left -= part;
    }
    return fread(frame, 1, 4, file) == 4 &&
           event_number(frame, 4) == crc32c_masked(data->data, data->count);
}

// How much of a file a run continues that has taken `step` steps: the records up to the first one
// that is damaged, or belongs to a later step, which will be taken again.
static inline long events_kept(FILE* file, int64_t step) {
    long kept = 0;
    blob data;
    memset(&data, 0, sizeof data);
    while (event_read(file, &data)) {
        int64_t at = event_step((const unsigned char*)data.data, data.count);
        if (at < 0 || at > step) {
            break;
        }
        kept += (long)(EVENT_FRAME + data.count + 4);
    }
    blob_free(&data);
    return kept;
}

#endif
