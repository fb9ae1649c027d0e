# What the scripts here share; they source it. DRY_RUN=1 prints the commands that would change
# something, one a line, in place of running them.
# shellcheck shell=bash disable=SC2034 # The names are for who sources this.
set -euo pipefail

# How a run ends: 0, its last step is made; 2, a mistake that another start would repeat; 75, it
# was asked to stop and has saved, or storage failed for longer than it tries again (EX_TEMPFAIL of
# sysexits.h); anything else, a crash.
readonly FINISHED=0 MISTAKE=2 STOPPED=75

# So many starts that end early, each within CRASH_SECONDS (600), are made in a row.
readonly EARLY_ENDS=${MAX_RESTARTS:-100}

# Where the bucket is mounted on every host.
readonly MOUNT=/mnt/bucket

# Hosts come back at different times after a preemption: they wait an hour for each other.
readonly TRAIN=(python train.py "--stopped_status=$STOPPED" "--start_timeout=${START_TIMEOUT:-3600}")

# fail SENTENCE: ends the script.
fail() {
  echo "error: $1" >&2
  exit "$MISTAKE"
}

# need NAME…: ends the script unless these variables are set.
need() {
  local name
  for name in "$@"; do
    [[ ${!name:-} ]] || fail "set $name=…; the head of $0 says what it is"
  done
}

# set_flags SLICES FLAGS…: `flags` becomes these flags of train.py, and one that makes each slice a
# replica, if there are several and none of these says how many replicas there are.
set_flags() {
  flags=("${@:2}")
  if (($1 > 1)) && [[ " ${flags[*]} " != *' --config.mesh.replica='* ]]; then
    flags+=("--config.mesh.replica=$1")
  fi
}

# run COMMAND…: runs it, or prints it as a shell would take it.
run() {
  if [[ ${DRY_RUN:-} ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}
