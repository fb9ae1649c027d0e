#!/usr/bin/env bash
# Run a command again until it is finished: after a preemption, a lost host or a crash.
#
#   launch/restart.sh python train.py --stopped_status=75 --config=… --workdir=…
#
# Start this script once on every host. It ends, with the status of the command,
#   - when the status is 0 (the run is finished) or 2 (a mistake that another start would repeat);
#   - when the status is 76 (a device computes wrong), because it would do so again on this host;
#   - when the script receives SIGTERM or Ctrl-C, which it passes on to the command first;
#   - after MAX_CRASHES (5) crashes in a row, each within CRASH_SECONDS (600) of its start;
#   - after MAX_RESTARTS (100) starts in a row that end this early with any status, because storage
#     that stays out of reach ends every start with 75, like a stop.
# It waits for RESTART_PAUSE (10) seconds before another start.
source "$(dirname "$0")/common.sh"
[[ $# -gt 0 ]] || fail "nothing to run; usage: $0 COMMAND…"

child='' stopping='' interrupted='' crashes=0 early_ends=0
stop() {
  stopping=1 interrupted=1
  kill -TERM "$child" 2>/dev/null || true
}
trap stop TERM INT

while :; do
  started=$SECONDS
  "$@" &
  child=$!
  [[ ! $stopping ]] || stop
  interrupted=1
  while [[ $interrupted ]]; do # A signal ends `wait`, not the command.
    interrupted='' status=0
    wait "$child" || status=$?
  done
  if ((SECONDS - started < ${CRASH_SECONDS:-600})); then ((++early_ends)); else early_ends=0; fi
  case $status in
    "$FINISHED" | "$MISTAKE" | "$FAULTY") break ;;
    "$STOPPED") crashes=0 ;;
    *) if ((early_ends)); then ((++crashes)); else crashes=0; fi ;;
  esac
  if ((crashes >= ${MAX_CRASHES:-5})); then
    echo "$0: $crashes crashes in a row; giving up" >&2
    break
  fi
  if ((early_ends >= EARLY_ENDS)); then
    echo "$0: $early_ends starts in a row ended early, the last with status $status; giving up" >&2
    break
  fi
  [[ $stopping ]] && break
  echo "$0: ended with status $status; starting it again" >&2
  sleep "${RESTART_PAUSE:-10}" &
  child=$!
  wait "$child" || true
  [[ $stopping ]] && break
done
exit "$status"
