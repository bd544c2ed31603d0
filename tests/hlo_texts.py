"""HLO text in the forms that only other machines or other stages write.

Cut from programs compiled for TPU v5e, with what plays no part left out.
"""

TPU_SCAN = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add.clone (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[]{:T(256)} parameter(0)
  %y = bf16[]{:T(256)} parameter(1)
  ROOT %add.1 = bf16[]{:T(256)} add(%x, %y)
}

%fused_computation.43 (param_0.126: bf16[1,512,256]) -> (bf16[1,512,256], u32[]) {
  %param_0.126 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.32 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.126), \
channel_id=16, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}, \
metadata={op_name="jit(step)/while/body/gather" stack_frame_id=16}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %custom-call.6 = (bf16[1,512,256]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) \
custom-call(%all-gather.32), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.70 (param_0.129: bf16[1,512,256]) -> bf16[1,512,256] {
  %param_0.129 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.34 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)S(1)} \
all-gather(%param_0.129), channel_id=16, replica_groups=[4,2]<=[2,4]T(1,0), \
dimensions={2}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %bitcast = bf16[1,512,256]{2,1,0} bitcast(%param_0.129)
}

%fused_computation.45 (param_0.133: bf16[1,512,256]) -> bf16[1,512,512] {
  %param_0.133 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.36 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.133), \
channel_id=16, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %custom-call.8 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)S(1)} \
custom-call(%all-gather.36), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.2.clone.1 (input_0.2: bf16[512,512], input_1.2: bf16[512,512]) \
-> (bf16[256,512], bf16[512,256]) {
  %input_0.2 = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %input_1.2 = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-reduce.13 = (bf16[512,512]{1,0:T(8,128)(2,1)}, \
bf16[512,512]{1,0:T(8,128)(2,1)}) all-reduce(%input_0.2, %input_1.2), channel_id=1, \
replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, \
to_apply=%add.clone
  %get-tuple-element.385 = bf16[512,512]{1,0} get-tuple-element(%all-reduce.13), \
index=0
  %get-tuple-element.386 = bf16[512,512]{1,0} get-tuple-element(%all-reduce.13), \
index=1
  %dynamic-slice.119 = bf16[256,512]{1,0} dynamic-slice(%get-tuple-element.385)
  %dynamic-slice.120 = bf16[512,256]{1,0} dynamic-slice(%get-tuple-element.386)
  ROOT %tuple.52 = (bf16[256,512]{1,0:T(8,128)(2,1)S(1)}, bf16[512,256]{1,0}) \
tuple(%dynamic-slice.119, %dynamic-slice.120)
}

%body (param: (s32[], bf16[1,512,256], s32[])) -> (s32[], bf16[1,512,256], s32[]) {
  %param = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0:T(8,128)(2,1)S(1)}, \
s32[]{:T(128)}) parameter(0)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%param), index=0
  %copy.14 = s32[]{:T(128)S(6)} copy(%get-tuple-element.1)
  %one.sunk = s32[]{:T(128)} constant(1)
  %add.38 = s32[]{:T(128)} add(%copy.14, %one.sunk)
  %get-tuple-element.2 = bf16[1,512,256]{2,1,0} get-tuple-element(%param), index=1
  %bound = s32[]{:T(128)} get-tuple-element(%param), index=2
  %start = (bf16[1,512,256]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) \
fusion(%get-tuple-element.2), kind=kCustom, calls=%fused_computation.43
  %middle = bf16[1,512,256]{2,1,0} fusion(%get-tuple-element.2), kind=kOutput, \
calls=%async_collective_fusion.70
  %done = bf16[1,512,512]{2,1,0} fusion(%get-tuple-element.2), kind=kCustom, \
calls=%fused_computation.45
  %grad = bf16[512,512]{1,0} bitcast(%done)
  %fusion.66 = (bf16[256,512]{1,0:T(8,128)(2,1)S(1)}, bf16[512,256]{1,0}) \
fusion(%grad, %grad), kind=kCustom, calls=%all-reduce-scatter.2.clone.1, \
metadata={op_name="jit(step)/while/body/dot_general" stack_frame_id=19}
  ROOT %tuple.56 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0}, /*index=2*/s32[]{:T(128)}) \
tuple(%add.38, %middle, /*index=2*/%bound)
}

%condition (param.1: (s32[], bf16[1,512,256], s32[])) -> pred[] {
  %param.1 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.294 = s32[]{:T(128)} get-tuple-element(%param.1), index=0
  %get-tuple-element.295 = s32[]{:T(128)} get-tuple-element(%param.1), index=2
  ROOT %lt.10 = pred[]{:T(512)} compare(%get-tuple-element.294, \
%get-tuple-element.295), direction=LT
}

ENTRY %main.6_spmd (w: bf16[1,512,256]) -> bf16[1,512,256] {
  %w = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %layers = s32[]{:T(128)} constant(3)
  %tuple.70 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0}, s32[]{:T(128)}) \
tuple(%zero, %w, %layers)
  %while.36 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0}, s32[]{:T(128)}) \
while(%tuple.70), condition=%condition, body=%body
  ROOT %out = bf16[1,512,256]{2,1,0} get-tuple-element(%while.36), index=1
}
"""

WINDOWED = """\
HloModule windowed, num_partitions=4

%step (i: u32[]) -> u32[] {
  %i = u32[]{:T(128)} parameter(0)
  %two = u32[]{:T(128)} constant(2)
  ROOT %sum = u32[]{:T(128)} add(%i, %two)
}

%test (i.1: u32[]) -> pred[] {
  %i.1 = u32[]{:T(128)} parameter(0)
  %eight = u32[]{:T(128)} constant(8)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %eight), direction=LT
}

%windowed_dot_general_body (arg: (f32[16,32], u32[])) -> (f32[16,32], u32[]) {
  %arg = (f32[16,32]{1,0}, u32[]{:T(128)}) parameter(0)
  %block = f32[16,32]{1,0} get-tuple-element(%arg), index=0
  %count = u32[]{:T(128)} get-tuple-element(%arg), index=1
  %collective-permute-start = (f32[16,32]{1,0}, f32[16,32]{1,0}, u32[], u32[]) \
collective-permute-start(%block), channel_id=1, \
source_target_pairs={{0,3},{1,0},{2,1},{3,2}}
  %collective-permute-done = f32[16,32]{1,0} \
collective-permute-done(%collective-permute-start)
  %next = u32[]{:T(128)} fusion(%count), kind=kLoop, calls=%step
  ROOT %result = (f32[16,32]{1,0}, u32[]{:T(128)}) \
tuple(%collective-permute-done, %next)
}

%windowed_dot_general_cond (arg.1: (f32[16,32], u32[])) -> pred[] {
  %arg.1 = (f32[16,32]{1,0}, u32[]{:T(128)}) parameter(0)
  %count.1 = u32[]{:T(128)} get-tuple-element(%arg.1), index=1
  ROOT %goes_on = pred[]{:T(512)} fusion(%count.1), kind=kLoop, calls=%test
}

ENTRY %main (x: f32[16,32]) -> f32[16,32] {
  %x = f32[16,32]{1,0} parameter(0)
  %zero = u32[]{:T(128)} constant(0)
  %init = (f32[16,32]{1,0}, u32[]{:T(128)}) tuple(%x, %zero)
  %while = (f32[16,32]{1,0}, u32[]{:T(128)}) while(%init), \
condition=%windowed_dot_general_cond, body=%windowed_dot_general_body
  ROOT %out = f32[16,32]{1,0} get-tuple-element(%while), index=0
}
"""

ASYNC = """\
HloModule asynchronous, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[64,8]) -> f32[16,8] {
  %p = f32[64,8]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[16,8]{1,0} reduce-scatter(%p), channel_id=4, \
replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[16,8], y: bf16[4]) -> f32[16,8] {
  %x = f32[16,8]{1,0} parameter(0)
  %y = bf16[4]{0} parameter(1)
  %ag = ((f32[16,8]{1,0}, bf16[4]{0}), (f32[64,8]{1,0}, bf16[16]{0})) \
all-gather-start(%x, %y), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %ar = f32[16,8]{1,0} all-reduce-start(%x), channel_id=2, \
replica_groups=[2,2]<=[4], to_apply=%add
  %lost = (f32[16,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), channel_id=3, \
replica_groups={{0,1},{2,3}}, dimensions={0}
  %ar.done = f32[16,8]{1,0} all-reduce-done(%ar)
  %ag.done = (f32[64,8]{1,0}, bf16[16]{0}) all-gather-done(%ag)
  %big = f32[64,8]{1,0} get-tuple-element(%ag.done), index=0
  %rs = ((f32[64,8]{1,0}), f32[16,8]{1,0}, u32[]) async-start(%big), calls=%wrapped
  %rs.update = ((f32[64,8]{1,0}), f32[16,8]{1,0}, u32[]) async-update(%rs), \
calls=%wrapped
  ROOT %rs.done = f32[16,8]{1,0} async-done(%rs.update), calls=%wrapped
}
"""

NO_PERCENT = """\
HloModule plain, replica_count=2, num_partitions=2

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(f32[] a, f32[] b)
}

ENTRY main {
  x = f32[3,5]{1,0} parameter(0)
  y = s4[7]{0} parameter(1)
  ROOT r = (f32[3,5]{1,0}, s4[7]{0}) \
all-reduce(f32[3,5]{1,0} x, /*index=1*/s4[7]{0} y), replica_groups={}, to_apply=add
}
"""
