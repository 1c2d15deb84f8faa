#!/usr/bin/env bash
# Part of use_programs.sh: several processes on the fake GPU, with --ranks and with the variables
# that torchrun sets. use_mpi.sh does the same on the CPU.
# shellcheck disable=SC2154 # the variables belong to use_programs.sh

# as_rank RANK WORLD ARGUMENT...: the process that torchrun would start, in the background as $!.
as_rank() {
    local rank=$1 world=$2
    shift 2
    RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$world \
        TORCHELASTIC_RUN_ID=none MASTER_PORT=29500 "$finetune" "$@" >"out.$rank" 2>&1 &
}

# The same with srun and Slurm's PMI-2.
as_task() {
    local rank=$1 world=$2
    shift 2
    PMI_RANK=$rank PMI_SIZE=$world SLURM_PROCID=$rank SLURM_NTASKS=$world SLURM_LOCALID=$rank \
        SLURM_STEP_TASKS_PER_NODE=$world SLURM_STEP_ID=0 SLURM_JOB_ID=7 \
        QLORA_MPI_LIBRARY=/nonexistent/libmpi.so "$finetune" "$@" >"out.$rank" 2>&1 &
}

same_adapter() {
    cmp -s "$1/adapter/adapter_model.safetensors" "$2/adapter/adapter_model.safetensors"
}

# A rank that is killed is named, and the other one says what it was doing.
rank_killed() {
    local launcher
    rm -rf killed
    FAKENCCL_WAITS=8000 "$finetune" "$@" --ranks 2 --steps 100000 --save-every 1 --out killed \
        >out 2>err &
    launcher=$!
    for ((i = 0; i < 1200; i++)); do
        [[ -s killed/checkpoint/latest ]] && break
        sleep 0.1
    done
    kill -9 "$(pgrep -P $launcher finetune | sed -n 2p)"
    wait $launcher
    status=$?
    check "a rank is killed ($status)" [ $status -eq 1 ]
    check "it is named" grep -q "finetune: rank 1 was ended by signal 9" err
    check "and the other one says why it ends" \
        grep -qE "finetune: rank 0: (training|talking to other ranks): ." err
}

ranks() { # --ranks, torchrun
    local gpu=(--model model --data sums.jsonl --mode f32 --tokens 64 --length 64 --rank 2)
    local first second old=${LD_LIBRARY_PATH:-}
    gpu+=(--steps 4 --accumulate 2 --eval 6 --eval-every 2)
    if [[ ! -e $root/$B/fake/libnccl.so.2 || ! -e $root/$B/fake/libcuda.so.1 ]]; then
        make -s -C "$root" B="$B" "$B"/fake/libcuda.so.1 "$B"/fake/libnccl.so.2 \
            "$B"/fake/libcublas.so.13 "$B"/fake/libcublasLt.so.13 || return
    fi
    export LD_LIBRARY_PATH=$root/$B/fake${old:+:$old} CUDA_VISIBLE_DEVICES=0 TMPDIR=$work
    rm -rf alone ranked plain torched
    works "one process" "${gpu[@]}" --out alone
    works "two processes" "${gpu[@]}" --ranks 2 --out ranked
    check "give the same adapter" same_adapter alone ranked
    check "and held-out losses" cmp -s <(grep eval_loss alone/log.jsonl) \
        <(grep eval_loss ranked/log.jsonl)
    check "the exchange is a graph from the second step on" \
        [ "$(grep -c '"exchange_graph":true' ranked/log.jsonl)" -eq 3 ]
    check "its bytes and time are in the log" \
        grep -q '"sent_bytes":[1-9][0-9]*,"exchange_ms":[0-9.]*,"waited_ms":' ranked/log.jsonl
    check "and its time is shown" grep -q "2 ranks, slowest [01]  exchange [0-9.]* ms" out
    QLORA_NCCL_GRAPH=0 works "without graphs of exchanges" "${gpu[@]}" --ranks 2 --out plain
    check "the adapter is the same" same_adapter alone plain
    check "and there are none" [ "$(grep -c exchange_graph plain/log.jsonl)" -eq 0 ]

    # What a run that was killed leaves behind is not taken for the id of the next one.
    as_rank 0 2 "${gpu[@]}" --out torched
    first=$!
    for ((i = 0; i < 600; i++)); do
        [[ -s torched/.finetune.nccl ]] && break
        sleep 0.1
    done
    kill -9 $first
    wait $first 2>/dev/null
    check "an id that was left behind" test -s torched/.finetune.nccl
    as_rank 1 2 "${gpu[@]}" --out torched --rank-limit 60
    second=$!
    sleep 1
    as_rank 0 2 "${gpu[@]}" --out torched --rank-limit 60
    wait $! $second
    cat out.0 out.1 >out
    check "is not used: the variables of torchrun" same_adapter alone torched
    check "no id is left" test ! -e torched/.finetune.nccl

    # srun may set the variables of MPICH although no MPI is there.
    rm -rf slurm
    as_task 1 2 "${gpu[@]}" --out slurm
    second=$!
    as_task 0 2 "${gpu[@]}" --out slurm
    wait $! $second
    cat out.0 out.1 >out
    check "srun with variables of MPICH, without MPI" same_adapter alone slurm
    check "and says so" grep -q "note: MPI is not used: cannot open MPI" out

    run "$finetune" "${gpu[@]}" --length max --memory 1G --ranks 2 --out o
    check "--length max of two processes" grep -q "needs --host-budget or --offload off" err
    RANK=0 WORLD_SIZE=2 refuses "--ranks beside a launcher" \
        "--ranks 3, but the variables of torchrun say 2 processes" "${gpu[@]}" --ranks 3 --out o
    CUDA_VISIBLE_DEVICES='' run "$finetune" "${gpu[@]}" --ranks 2 --out o
    check "a rank without a GPU ($status)" [ "$status" -eq 1 ]
    check "says so, and why" grep -q \
        "rank 1: .*this one has no GPU (device 1: the driver reports 1 CUDA .*); .* use mpirun" err
    rank_killed "${gpu[@]}"
    export LD_LIBRARY_PATH=$old
    unset CUDA_VISIBLE_DEVICES TMPDIR
}
