#!/usr/bin/env bash
# Train on TPU slices of GKE, as a JobSet with one Job for each slice.
#
#   IMAGE=REGISTRY/NAME BUCKET=my-bucket ACCELERATOR=tpu-v6e-slice TOPOLOGY=16x16 [SLICES=2] \
#     launch/jobset.sh NAME --config=configs/lm_pile.py:1_5b --workdir=gs://my-bucket/runs/1_5b
#
# Build IMAGE with launch/Dockerfile. ACCELERATOR and TOPOLOGY are the labels of the node pools, one
# for each slice. CHIPS_PER_HOST is 4 by default. SERVICE_ACCOUNT (default) needs write access to
# BUCKET. DRY_RUN=1 prints the manifest. After any end but a mistake (status 2) all slices start
# again, MAX_RESTARTS (100) times. Status 76 names a node to leave out: kubectl cordon NODE.
source "$(dirname "$0")/common.sh"
need IMAGE BUCKET ACCELERATOR TOPOLOGY
[[ $# -gt 0 && $1 != -* ]] || fail "name the JobSet first; the head of $0 says how"
name=$1 slices=${SLICES:-1} chips=${CHIPS_PER_HOST:-4} all=$((${TOPOLOGY//x/*}))
((all % chips == 0)) || fail "TOPOLOGY=$TOPOLOGY is not made of hosts with CHIPS_PER_HOST=$chips"
hosts=$((all / chips))
set_flags "$slices" "${@:2}"
arguments=("${TRAIN[@]}" "${flags[@]}")
printf -v command "'%s', " "${arguments[@]//\'/\'\'}" # as YAML strings
# Cache no metadata of the bucket, because other hosts write to it.
options=implicit-dirs,metadata-cache:ttl-secs:0,file-cache:cache-file-for-range-read:true
options+=,file-cache:max-size-mb:${CACHE_MB:-50000}

manifest() {
  cat <<END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  annotations: # Each slice has a node pool of its own.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: ${MAX_RESTARTS:-100}
    restartStrategy: BlockingRecreate # Hosts of the previous start must be gone first.
    rules:
    - {name: mistake, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}
  replicatedJobs:
  - name: slice
    replicas: $slices
    template:
      spec:
        completionMode: Indexed
        parallelism: $hosts
        completions: $hosts
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - {action: FailJob, onExitCodes: {containerName: train, operator: In, values: [$MISTAKE]}}
        template:
          metadata:
            annotations: {gke-gcsfuse/volumes: 'true', gke-gcsfuse/ephemeral-storage-limit: '0'}
          spec:
            restartPolicy: Never
            serviceAccountName: ${SERVICE_ACCOUNT:-default}
            terminationGracePeriodSeconds: 300
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $ACCELERATOR
              cloud.google.com/gke-tpu-topology: $TOPOLOGY
            containers:
            - name: train
              image: $IMAGE
              command: [${command%, }]
              env: [{name: XDG_CACHE_HOME, value: $MOUNT/cache},
                {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
              resources: {limits: {google.com/tpu: $chips}}
              volumeMounts:
              - {name: bucket, mountPath: $MOUNT}
              - {name: memory, mountPath: /dev/shm}
            volumes:
            - {name: memory, emptyDir: {medium: Memory}}
            - name: bucket
              csi:
                driver: gcsfuse.csi.storage.gke.io
                volumeAttributes: {bucketName: $BUCKET, mountOptions: '$options'}
END
}

if [[ ${DRY_RUN:-} ]]; then manifest; else manifest | kubectl apply -f -; fi
