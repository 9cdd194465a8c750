from drv import *
T=[int(x) for x in sys.argv[1].split(',')]
numba.set_num_threads(1)
for D in (64,128):
  for c in (0,1):
    H=2;N=2048
    rng=np.random.default_rng(0)
    q,k,v,do=(rng.standard_normal((1,H,N,D),dtype='f4') for _ in range(4))
    o,l=nattn.attention(q,k,v,causal=bool(c),return_lse=True); p=Problem.build(q,k,v,causal=bool(c))
    for t in T:
      for bl in (64,128):
        backward(p,do,o,l,t,bl); R=[]
        for _ in range(5):
            a=fma_peak('float32',1,.01); s=time.perf_counter(); backward(p,do,o,l,t,bl); s=time.perf_counter()-s
            R.append(10*H*N*N*D*(.5 if c else 1)/s/1e9/a*100)
        print(D,c,'T',t,'block',bl,'%.1f'%np.median(R),'max %.1f'%max(R),flush=True)
