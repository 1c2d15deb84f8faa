// ---- the files of a model folder, or of a GGUF file in their place ------------------------------

// Reads folder/name, if there is such a file. `folder` may also be a GGUF file.
static qlora_result qlora__text_folder_read(qlora__env* env, const char* folder, const char* name,
                                            qlora_text_bytes* out, bool* found) {
    char path[QLORA__PATH_ROOM];
    if (qlora__gguf_path(folder)) {
        return qlora__text_gguf_read(env, folder, name, out, found);
    }
    QLORA__TRY(qlora__path_join(env, folder, name, path));
    return qlora__text_file_read(env, path, out, found);
}
