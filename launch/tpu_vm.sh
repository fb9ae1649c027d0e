#!/usr/bin/env bash
# Train on existing TPU VMs: one host, a slice, or the slices of one queued resource.
#
#   ZONE=us-east5-a BUCKET=my-bucket launch/tpu_vm.sh NAME[,NAME…] \
#     --config=configs/lm_pile.py:1_5b --workdir=gs://my-bucket/runs/1_5b
#
# ZONE is the zone of the VMs. BUCKET is optional and is mounted at /mnt/bucket on every host. The
# script copies the last commit of this repository to every host and runs tpu_host.sh there, whose
# head says how to follow and to stop the run. The same command again continues from the last
# checkpoint.
source "$(dirname "$0")/common.sh"
need ZONE
[[ $# -gt 0 && $1 != -* ]] || fail "name the TPUs first; the head of $0 says how"
IFS=, read -ra names <<<"$1"
set_flags "${#names[@]}" "${@:2}"

on_all=("--zone=$ZONE" --worker=all --quiet)
code=$(mktemp -d)/tokenformer_jax.tar.gz
trap 'rm -rf "$(dirname "$code")"' EXIT
run git -C "$(dirname "$0")/.." archive --output="$code" HEAD

printf -v start '%q ' env ${BUCKET:+"BUCKET=$BUCKET"} ${CACHE_MB:+"CACHE_MB=$CACHE_MB"} \
  tokenformer_jax/launch/tpu_host.sh "${flags[@]}"
unpack='mkdir -p tokenformer_jax && tar -xzf tokenformer_jax.tar.gz -C tokenformer_jax'
for name in "${names[@]}"; do
  run gcloud compute tpus tpu-vm scp "$code" "$name:" "${on_all[@]}"
  run gcloud compute tpus tpu-vm ssh "$name" "${on_all[@]}" --command="$unpack && $start"
done
