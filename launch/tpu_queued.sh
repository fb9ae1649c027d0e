#!/usr/bin/env bash
# Train on queued TPUs to the end: request them, start, and request them again after a preemption.
#
#   ZONE=us-east5-a TYPE=v6e-256 RUNTIME=v2-alpha-tpuv6e BUCKET=my-bucket [SLICES=2] [SPOT=1] \
#     launch/tpu_queued.sh NAME --config=configs/lm_pile.py:1_5b --workdir=gs://my-bucket/runs/1_5b
#
# TYPE is the type of one slice, RUNTIME the image of its VMs. SPOT=1 requests cheaper TPUs that may
# be preempted. Leave the script running, for example in tmux, on a machine that stays on. If it
# ends, start it again. The script deletes the TPUs when the run is finished, so the work directory
# must be in the bucket.
source "$(dirname "$0")/common.sh"
need ZONE TYPE RUNTIME BUCKET
[[ $# -gt 0 && $1 != -* ]] || fail "name the queued resource first; the head of $0 says how"
[[ " $* " == *" --workdir=gs://"* || " $* " == *" --workdir=$MOUNT/"* ]] ||
  fail "TPUs are deleted; give --workdir=gs://$BUCKET/…"
name=$1 slices=${SLICES:-1}
shift

nodes=("--node-id=$name") names=$name
if ((slices > 1)); then
  nodes=("--node-count=$slices" "--node-prefix=$name")
  names=$(seq -f "$name-%g" -s, 0 $((slices - 1)))
fi
queued=(gcloud compute tpus queued-resources) here=("$name" "--zone=$ZONE")
create() {
  run "${queued[@]}" create "${here[@]}" "${nodes[@]}" ${SPOT:+--spot} \
    "--accelerator-type=$TYPE" "--runtime-version=$RUNTIME"
}
delete() { run "${queued[@]}" delete "${here[@]}" --force --quiet; }
start() { "$(dirname "$0")/tpu_vm.sh" "$names" "$@" || echo "$0: not all hosts started" >&2; }
state() { "${queued[@]}" describe "${here[@]}" --format='value(state.state)' || true; }

# Print systemd's state of the run on every host: running, exited (finished), failed, dead (absent);
# and the status of the script that runs it there.
units() {
  local node
  for node in ${names//,/ }; do
    gcloud compute tpus tpu-vm ssh "$node" "--zone=$ZONE" --worker=all --quiet \
      --command='systemctl show --property=SubState,ExecMainStatus tokenformer' || return
  done
}

# Wait for the end of the run (true) or of the TPUs (false).
wait_for_end() {
  local started='' now
  while sleep "${POLL_SECONDS:-60}"; do
    case $(state) in
      ACTIVE) [[ $started ]] || { started=1 && start "$@"; } ;;
      SUSPENDED | FAILED) return 1 ;;
      *) continue ;; # The TPUs are being made, or Google Cloud cannot be reached.
    esac
    now=$(units) || continue
    case $now in
      *"ExecMainStatus=$FAULTY"*) return 1 ;; # A TPU computes wrong: ask for others.
      *failed*) fail "the run has given up; see sudo journalctl -u tokenformer on its hosts" ;;
      *dead*) start "$@" ;; # A host was rebooted.
      *running*) ;;
      *exited*) return ;;
    esac
  done
}

if [[ ${DRY_RUN:-} ]]; then
  create && start "$@" && delete
  exit
fi
"${queued[@]}" describe "${here[@]}" >/dev/null 2>&1 || create
until wait_for_end "$@"; do
  delete
  create
done
delete
