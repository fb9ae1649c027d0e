# Shared by the scripts of this folder, which source it. DRY_RUN=1 prints the commands that change
# something, one per line, instead of running them.
# shellcheck shell=bash disable=SC2034 # The scripts that source this file use the variables.
set -euo pipefail

# Exit statuses of a run: 0, the last step is made; 2, a mistake that another start would repeat; 75
# (EX_TEMPFAIL of sysexits.h), it was asked to stop and has saved, or storage failed for longer than
# the run retries; 76, a device computes wrong; anything else, a crash.
readonly FINISHED=0 MISTAKE=2 STOPPED=75 FAULTY=76

# Give up after so many starts in a row that end early, each within CRASH_SECONDS (600).
readonly EARLY_ENDS=${MAX_RESTARTS:-100}

# The mount point of the bucket on every host.
readonly MOUNT=/mnt/bucket

# Hosts wait an hour for each other, because they return at different times after a preemption.
readonly TRAIN=(python train.py "--stopped_status=$STOPPED" "--start_timeout=${START_TIMEOUT:-3600}")

# fail SENTENCE: print the sentence and end the script.
fail() {
  echo "error: $1" >&2
  exit "$MISTAKE"
}

# need NAME…: end the script unless these variables are set.
need() {
  local name
  for name in "$@"; do
    [[ ${!name:-} ]] || fail "set $name=…; the head of $0 says what it is"
  done
}

# set_flags SLICES FLAGS…: set `flags` to these flags of train.py. With several slices, also make
# each slice a replica, unless FLAGS set the number of replicas.
set_flags() {
  flags=("${@:2}")
  if (($1 > 1)) && [[ " ${flags[*]} " != *' --config.mesh.replica='* ]]; then
    flags+=("--config.mesh.replica=$1")
  fi
}

# run COMMAND…: run the command, or print it quoted for a shell.
run() {
  if [[ ${DRY_RUN:-} ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}
