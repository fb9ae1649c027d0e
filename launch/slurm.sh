#!/usr/bin/env bash
# Train on GPUs under SLURM, with one task for each GPU. From the root of this repository:
#
#   sbatch --nodes=4 launch/slurm.sh --config=configs/lm_pile.py:1_5b --workdir=/shared/runs/1_5b
#
# Options of sbatch before the script override the options below. The job is queued again when its
# time is up, when it is preempted, when a node is lost, when storage fails, and after a crash later
# than CRASH_SECONDS (600) after the start. It is not queued again when it is finished, is cancelled
# or makes a mistake, nor, after MAX_RESTARTS (100) starts, when it ends that early. A node whose GPU
# computes wrong (config.train.check_devices) is left out from then on; faulty_hosts-JOB names it.
# A task sees all GPUs of its node and takes the one with its local number: set no --gpus-per-task.
#SBATCH --job-name=tokenformer
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" || exit # SLURM runs a copy of this file.
source launch/common.sh
trap : TERM # This shell must outlive the tasks to see their status.

status=0
faulty=$PWD/faulty_hosts-${SLURM_JOB_ID:-0}
run srun --kill-on-bad-exit=0 "${TRAIN[@]}" "--faulty_hosts=$faulty" "$@" || status=$?
early=$((SECONDS < ${CRASH_SECONDS:-600}))
case $status in
  "$FINISHED" | "$MISTAKE") exit "$status" ;;
  "$STOPPED" | "$FAULTY") ((!early || ${SLURM_RESTART_COUNT:-0} < EARLY_ENDS)) || exit "$status" ;;
  *) ((!early)) || exit "$status" ;;
esac
# A job that SLURM is ending (cancelled or preempted) is no longer RUNNING.
if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then
  scontrol requeue "$SLURM_JOB_ID"
  if [[ -s $faulty ]]; then # SLURM changes these nodes of waiting jobs only.
    scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$(sort -u "$faulty" | paste -sd,)"
  fi
fi
exit "$status"
